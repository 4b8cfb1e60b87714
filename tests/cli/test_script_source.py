"""What a script says of itself before it runs."""

import pytest

from holdfast.cli.script_source import read_script, set_before_import

SEEN = {
    "an item": ('os.environ["OMP_NUM_THREADS"] = "4"', ("OMP_NUM_THREADS", 2)),
    "of another name": ('environ["TORCH_LOGS"] = level', ("TORCH_LOGS", 2)),
    "a default": ('os.environ.setdefault("TORCHDYNAMO_VERBOSE", "1")', ("TORCHDYNAMO_VERBOSE", 2)),
    "a dict": ('os.environ.update({"A": "1", "MKL_NUM_THREADS": "4"})', ("MKL_NUM_THREADS", 2)),
    "words": ('os.environ.update(TORCH_DISTRIBUTED_DEBUG="DETAIL")', ("TORCH_DISTRIBUTED_DEBUG", 2)),
    "a union": ('os.environ |= {"KMP_AFFINITY": "none"}', ("KMP_AFFINITY", 2)),
    "putenv": ('os.putenv("ATEN_CPU_CAPABILITY", "default")', ("ATEN_CPU_CAPABILITY", 2)),
    "in a function": ('def f():\n    os.environ["OMP_NUM_THREADS"] = "4"', ("OMP_NUM_THREADS", 3)),
    "a default of what is set": ('os.environ.setdefault("OMP_SET_ALREADY", "1")', None),
    "read": ('n = os.environ["OMP_NUM_THREADS"]', None),
    "read when it is used": ('os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["NCCL_DEBUG"] = "0"', None),
    "a folder that is asked for each time": ('os.environ["TORCHINDUCTOR_CACHE_DIR"] = "x"', None),
    "for a runtime that is loaded later": ('os.environ["KMP_DUPLICATE_LIB_OK"] = "TRUE"', None),
    "another dict": ('settings["OMP_NUM_THREADS"] = "4"', None),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_variable_that_torch_reads_at_its_import(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_SET_ALREADY", "1")
    source, expected = SEEN[name]
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{source}\n")
    tree = read_script(str(script), module=False)
    assert tree is not None
    assert set_before_import(tree) == expected
