"""Your own function or model behind HTTP: `reflex serve python:module:function`, or FILE.onnx.

The smallest product on the parts that all share, and so the example of one: `source` reads what is to be served,
`values` says how its items come in and go out, `processor` runs batches of them, `server` is the life of the server,
`app` its requests.
"""
