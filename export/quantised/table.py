"""Methods by the name that a config.json gives them (`quant_method`)."""

from .awq import AWQ
from .bitsandbytes import BITSANDBYTES
from .compressed import COMPRESSED_TENSORS
from .fp8 import FP8
from .gptq import GPTQ
from .modelopt import MODELOPT
from .mxfp4 import MXFP4

METHODS = {
    "awq": AWQ,
    "bitsandbytes": BITSANDBYTES,
    "compressed-tensors": COMPRESSED_TENSORS,
    "fp8": FP8,
    "gptq": GPTQ,
    "modelopt": MODELOPT,
    "mxfp4": MXFP4,
}
