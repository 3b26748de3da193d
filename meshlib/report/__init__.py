"""Reports of a program on a slice: an HTML page, cells of notebooks, matplotlib Axes.

Pictures are SVG from `svg`: a page has to work without scripts and without a network, its colours have to follow dark
pages and print, and 100 layers have to stay under a megabyte. Libraries that draw charts bring a script of megabytes,
or fixed colours (matplotlib's SVG); matplotlib is what `.plot` is for.
"""
