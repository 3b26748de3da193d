"""Image models, each from one frozen config, composed of layers alone.

tower    shared layers: convolutions and norms with the updates of moving averages
resnet   ResNet-18 to 152, versions 1, 1.5 and 2
step     training and evaluation steps of any classifier
"""
