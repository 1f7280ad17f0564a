"""What is measured against: a bare ASGI hello, a batcher by hand, mosec, LitServe, and ONNX Runtime alone."""
