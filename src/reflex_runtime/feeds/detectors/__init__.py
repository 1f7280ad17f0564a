"""What outputs of detectors mean: one dialect per form of output, recognised when the model starts.

`recognise.dialect_of` looks at what a graph returns for one blank picture; nothing else decides. The dialect it returns
makes a `Found` per picture of every call: boxes in pixels of the graph's input. `picture_input.result_of` makes a
feed's result of it.
"""
