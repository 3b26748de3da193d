"""MaxText configurations: read as programs, and written for plans.

keys, ignored  every key: its default and effect
settings       a file, its base files, its model's file and overrides, as one mapping
model          fields -> TransformerConfig, by decoder block
mesh, rules    ICI and DCN sizes -> mesh; logical axis rules -> layout
remat, kernels policies by name, blocks of attention; optimizer: its state
purpose, unread  keys of inference; keys with a cost that are not expressed
run            `read_maxtext`, and the program of a run on a slice
"""
