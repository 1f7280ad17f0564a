"""Your own function or model behind HTTP: `reflex serve python:module:function`, or FILE.onnx.

The smallest product on the common parts, and so the example of one: `source` reads the function, `values` reads items
and writes results, `processor` runs batches, `server` has the requests, `app` the paths.
"""
