"""Slicing, packing and writing back: all arithmetic of places in flat buffers.

cuts      where a buffer may be cut: into slices, into pieces, between blocks
ranges    some elements of a flat tensor: how many, which part of them, packed
packing   tensors one after the other in a buffer, as values or as bytes, and back
windows   many tensors as a few buffers of bounded size, whatever their strides
rows      tensors divided between rows, for the ranks of a host
staging   the memory of buffers, used again

Each word means one thing here:

buffer   a flat tensor that travels, or is summed, as a whole
window   a buffer for tensors of one dtype and device, or for pieces of them
slice    what one member of a group owns of a buffer; all slices together are the buffer
piece    a part of what is too large to go as one: of a tensor, of a buffer, of a bucket
run      values of a buffer that follow each other in one tensor, too
block    neighbours in a tensor that a lossy reducer treats together: no cut goes through one
range    elements of a flat tensor that follow each other: (first, one after the last)
bounds   ranges that follow each other and leave nothing out
row      ``tensor[i]``; a tensor without dimensions is one row
"""
