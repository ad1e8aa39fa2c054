"""LMCache's own tests, unmodified, with our plugins in place of its classes.

The tests come from a checkout or an unpacked source distribution of LMCache; nothing
of them is here. `stand_ins` puts our classes where the tests import LMCache's, `chosen`
says which tests that is done for, and which not and why.
"""
