"""Models of images, each from one frozen config, written in layers alone.

tower    what they share: convolutions and norms with the updates of moving averages
resnet   ResNet-18 to 152, versions 1, 1.5 and 2
step     a training step and an evaluation step of any classifier
"""
