"""What is measured against: a bare ASGI hello, the simplest batcher by hand, mosec, LitServe, and ONNX Runtime alone."""
