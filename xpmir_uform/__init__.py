"""Train small multimodal embedding models reproducibly, as experimaestro tasks.

``__init__.pyi`` lists the public names, for type checkers too. Each is imported when it is first used, so that the
plain modules of the model and the data need neither experimaestro nor xpm-torch nor lightning.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
