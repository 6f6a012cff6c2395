"""The version of this package: stated here and nowhere else.

It lies beside the code, so that it is this code's whatever else is installed, and wherever from. What
builds wheels reads the line below as text.
"""

__version__ = "0.1.0"
