"""The encoder and its heads.

Names are imported when they are first used: the plain modules (packing, attention, encoder, head_modules) need neither
experimaestro nor xpm-torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
