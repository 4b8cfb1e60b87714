"""`-m holdfast.titan` on a CPU: titan_cpu.py FOLDER ARGUMENTS...

torchtitan knows accelerators only, so what it asks one for is answered here, and flex attention, which has no backward pass on
a CPU, is torch's own causal attention. Everything else is torchtitan's. FOLDER has a tokenizer and a text, since the
wheel does not bring those of the debug configurations.
"""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *which: "cpu"
torch.cpu.get_device_properties = lambda *which: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *which: None
torch.cpu.memory_stats = lambda *which: {}
warnings.simplefilter("ignore")

import torchtitan.hf_datasets.text_datasets as text  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from holdfast import titan  # noqa: E402


def attend(q, k, v, scale=None, **more):
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True), None


FlexAttention.compiled_flex_attn = staticmethod(attend)
FlexAttention._compiled_flex_attn = staticmethod(attend)
FOLDER = Path(sys.argv[1])
text.DATASETS["c4_test"].path = str(FOLDER / "text")
titan.run([*sys.argv[2:], f"--hf_assets_path={FOLDER}/tokenizer", f"--dump_folder={FOLDER}/out"])
