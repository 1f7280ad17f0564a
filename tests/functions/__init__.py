"""Tests of `reflex serve python:module:function`."""
