"""`-m holdfast.titan` on a CPU: titan_cpu.py FOLDER ARGUMENTS... TITAN_LAYERS=2 leaves so many layers, of at most 8 experts each.
TITAN_STILL=1: the learning rate is 0, so a step changes no weight. TITAN_DIES=FILE: the second worker of the replica that writes
the checkpoint of step 4 is killed in that; once, if FILE is not there.

torchtitan knows accelerators only, so what it asks one for is answered here, and flex attention, which has no backward pass on
a CPU, is torch's own causal attention. Everything else is torchtitan's. FOLDER has a tokenizer and a text, since the
wheel does not bring those of the debug configurations.
"""

import dataclasses
import os
import signal
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
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from holdfast import titan  # noqa: E402
from holdfast.adapters.torchtitan.checkpoints import Checkpoints  # noqa: E402


def attend(q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, **more):
    """What flex attention computes, without its kernel: with the mask that it was given, and what sinks need beside it."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    heads = (q.shape[0], 1, q.shape[2], k.shape[2])
    seen = create_mask(block_mask.mask_mod, *heads, device="cpu")
    scores = scores.float().masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


FlexAttention.compiled_flex_attn = staticmethod(attend)
FlexAttention._compiled_flex_attn = staticmethod(attend)


def configs_in(part):
    """Every configuration within one."""
    if isinstance(part, list | tuple):
        for one in part:
            yield from configs_in(one)
    elif dataclasses.is_dataclass(part):
        yield part
        for field in dataclasses.fields(part):
            yield from configs_in(getattr(part, field.name))


def smaller(config, prepared=titan.prepared):
    """The same kinds of layers, fewer of them: what takes minutes here takes an accelerator no time."""
    config = prepared(config)
    if layers := int(os.environ.get("TITAN_LAYERS", "0")):
        model = config.model_spec.model
        del model.layers[layers:]
        for part in configs_in(model.layers):
            if hasattr(part, "num_experts"):
                part.num_experts = min(part.num_experts, 8)
            if hasattr(part, "top_k"):
                part.top_k = min(part.top_k, 2)
            if hasattr(part, "gate") and hasattr(part.gate, "out_features"):
                part.gate.out_features = part.num_experts
    if os.environ.get("TITAN_STILL"):
        for group in config.optimizer.param_groups:
            group.optimizer_kwargs["lr"] = 0.0
    return config


def dying(self, state, checkpoint_id, *args, dcp_save=Checkpoints.dcp_save, **more):
    once = Path(os.environ["TITAN_DIES"])
    if checkpoint_id.endswith("step-4") and torch.distributed.get_rank() == 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return dcp_save(self, state, checkpoint_id, *args, **more)


if os.environ.get("TITAN_DIES"):
    Checkpoints.dcp_save = dying
titan.prepared = smaller
FOLDER = Path(sys.argv[1])
text.DATASETS["c4_test"].path = str(FOLDER / "text")
titan.run([*sys.argv[2:], f"--hf_assets_path={FOLDER}/tokenizer", f"--dump_folder={FOLDER}/out"])
