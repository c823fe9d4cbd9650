"""Detectors that compare answers drawn to the same prompt; one idea a file.

All read one pool of answers (`beatrice sample`: ten at temperature 1). SelfCheckGPT was
published with twenty, EigenScore at temperature 0.5.
"""
