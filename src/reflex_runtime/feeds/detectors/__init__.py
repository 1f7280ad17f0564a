"""Detectors in ONNX: a dialect for each form of outputs, recognised when the model starts.

`recognise.dialect_of` decides by the outputs for one blank picture and the metadata. The dialect makes a `Found` of the
outputs for each picture, in pixels of the graph's input; `picture_input.result_of` makes a feed's result of it.
"""
