"""Every private torch API that graphshard uses, by subsystem, read on torch 2.11.0 and 2.13.0.

Nothing outside of this package names what torch spells with an underscore. It imports torch alone.
"""
