"""Whether a program passes its tests."""
