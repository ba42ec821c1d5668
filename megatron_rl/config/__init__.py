"""The configuration tree of a run, and its file format.

Every process loads the resolved file once. Imports none of our other packages.
"""
