"""Reports of a program on a slice: an HTML page, cells of notebooks, matplotlib Axes.

    page          the file; its template, style and script lie beside it
    verdict  torus  layout  memory  timeline  roofline  collectives  alternatives  operations    its sections
    links         what leads from one picture to another
    shards        the blocks of a tensor of any rank
    markup  svg   HTML and static pictures as text

Pictures are SVG from `svg`, about 150 lines of scales, axes and shapes: a page has to work without scripts and without
a network, its colours have to follow dark pages and print, and 100 layers have to stay under a megabyte. Libraries that
draw charts bring a script of megabytes, or fixed colours (matplotlib's SVG); matplotlib is what `.plot` is for.
"""
