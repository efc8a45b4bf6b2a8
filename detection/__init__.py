"""Finetuning of object detectors for detection metrics such as AP50.

Empty so far: only the package exists.
"""
