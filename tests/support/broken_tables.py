"""Contents of files that are no gate tables, and what the refusal must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kda_backend.gate import dump_table
from kda_backend.gate.files import MOST_BYTES
from tests.support.tables import a_cell, a_table


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file of a table with one cell, after ``change`` had its JSON data."""
    data = json.loads(dump_table(a_table(a_cell())))
    change(data)
    return json.dumps(data).encode()


def in_cell(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["cells"][0].update(changes)


def in_fused(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["cells"][0]["lanes"]["fused+ring"].update(changes)


def in_provenance(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["provenance"].update(changes)


WHOLE = dump_table(a_table(a_cell()))
BROKEN = {
    "empty": (b"", "is not JSON"),
    "blank": (b" \n", "is not JSON"),
    "truncated": (WHOLE[: len(WHOLE) // 2].encode(), "is not JSON"),
    "binary": (bytes(range(256)), "is not UTF-8 text"),
    "nul bytes": (b"\0" * 64, "is not JSON"),
    "huge": (b" " * (MOST_BYTES + 1), "larger than the 16 MiB"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "huge number": (b'{"schema": ' + b"9" * 5000 + b"}", "Exceeds the limit|schema must be 1"),
    "list": (b"[]", "is no gate table"),
    "null": (b"null", "is no gate table"),
    "vLLM's": (b'{"1": {"BLOCK_SIZE_M": 16}, "triton_version": "3.4.0"}', "is no gate table"),
    "no schema": (edited(lambda d: d.pop("schema")), "is no gate table"),
    "schema 2": (edited(lambda d: d.update(schema=2)), "schema must be 1, got '2'.*tune again"),
    "schema 1.0": (edited(lambda d: d.update(schema=1.0)), "schema must be 1"),
    "schema true": (edited(lambda d: d.update(schema=True)), "schema must be 1"),
    "unknown key": (edited(lambda d: d.update(note="x")), r"missing \[\], unknown \['note'\]"),
    "missing key": (edited(lambda d: d.pop("arch")), r"missing \['arch'\]"),
    "doubled key": (WHOLE.replace('"arch"', '"dtype": "bfloat16", "arch"').encode(), "'dtype' is there twice"),
    "other shape": (edited(lambda d: d["shape"].update(H=4)), "its contents are those of H=4,HV=8"),
    "other device": (edited(lambda d: d.update(device_name="NVIDIA B200")), "those of .*device_name=NVIDIA_B200"),
    "other dtype": (edited(lambda d: d.update(dtype="float16")), "those of .*dtype=float16"),
    "no dtype": (edited(lambda d: d.update(dtype="float32")), "dtype must be one of"),
    "no shape": (edited(lambda d: d["shape"].update(K=96)), "head_k_dim must be one of"),
    "shape of text": (edited(lambda d: d["shape"].update(H="8")), "num_heads must be an int"),
    "shape of words": (edited(lambda d: d.update(shape="H=8")), "shape must be an object"),
    "arch of lines": (edited(lambda d: d.update(arch="sm\n90")), "arch must be 1..40 printable"),
    "name of escapes": (edited(lambda d: d.update(device_name="\x1b[2J")), "device_name must be 1..200 printable"),
    "margin NaN": (WHOLE.replace('"margin": 0.02', '"margin": NaN').encode(), "NaN is no number"),
    "margin inf": (WHOLE.replace('"margin": 0.02', '"margin": 1e999').encode(), "provenance.margin must be a share"),
    "margin negative": (edited(in_provenance(margin=-0.1)), "provenance.margin must be a share"),
    "margin text": (edited(in_provenance(margin="2 %")), "provenance.margin must be a number"),
    "one pass": (edited(in_provenance(passes=1)), "provenance.passes must be within 2"),
    "more passes": (edited(in_provenance(passes=3)), r"cell \(safe gate.*has 2 passes of provenance.passes=3"),
    "no command": (edited(in_provenance(command="")), "provenance.command must be 1"),
    "cells no list": (edited(lambda d: d.update(cells={})), "cells must be a list"),
    "cell no object": (edited(lambda d: d.update(cells=[3])), "cell 1: cell 1 must be an object"),
    "cell twice": (edited(lambda d: d["cells"].append(d["cells"][0])), r"cell \(safe gate, .*B=1\) is there twice"),
    "T zero": (edited(in_cell(T=0)), "cell 1: T must be within 1"),
    "T true": (edited(in_cell(T=True)), "cell 1: T must be a whole number"),
    "B half": (edited(in_cell(B=1.5)), "cell 1: B must be a whole number"),
    "B huge": (edited(in_cell(B=1 << 40)), "cell 1: B must be within"),
    "no gate": (edited(in_cell(gate="soft")), "cell 1: gate must be one of"),
    "no form": (edited(in_cell(form=["recurrent"])), "cell 1: form must be one of"),
    "no mode": (edited(in_cell(mode="Ring")), "cell 1: mode must be one of"),
    "no option": (edited(in_cell(option="fast")), "cell 1: option must be one of"),
    "chunked snapshots": (edited(in_cell(form="chunked", mode="snapshots")), "'chunked' goes with mode 'ring' only"),
    "chunked T=17": (edited(in_cell(form="chunked", T=17)), "takes T up to 16, got 17"),
    "folded snapshots": (edited(in_cell(option="fold-on-verify", mode="snapshots")), "snapshots are never folded"),
    "unknown lane": (edited(in_cell(lane="fastest")), r"cell 1 \(.*B=1\): lane must be one of"),
    "other mode's lane": (edited(in_cell(lane="fused")), "lane must be one of"),
    "lanes missing": (edited(lambda d: d["cells"][0]["lanes"].pop("unfused+ring")), "lanes must be"),
    "lanes more": (edited(lambda d: d["cells"][0]["lanes"].update(fused={"why": "x"})), "lanes must be"),
    "lanes no object": (edited(in_cell(lanes=[1])), "lanes must be an object"),
    "lane no object": (edited(lambda d: d["cells"][0]["lanes"].update({"fused+ring": 2.6})), "must be an object"),
    "us NaN": (WHOLE.replace("[2.0, ", "[NaN, ").encode(), "NaN is no number"),
    "us -inf": (WHOLE.replace("[2.0, ", "[-Infinity, ").encode(), "-Infinity is no number"),
    "us overflow": (WHOLE.replace("[2.0, ", "[1e999, ").encode(), "microseconds above 0"),
    "us negative": (edited(in_fused(us=[-2.0, 2.0])), r"cell 1 \(.*\): us must hold microseconds above 0"),
    "us zero": (edited(in_fused(us=[0, 2.0])), "us must hold microseconds above 0"),
    "us rounds to zero": (edited(in_fused(us=[1e-9, 2.0])), "us must hold microseconds above 0"),
    "us text": (edited(in_fused(us=["2", 2.0])), "us must hold numbers"),
    "us one pass": (edited(in_fused(us=[2.0])), "figures of 2..64 independent passes, got 1"),
    "us number": (edited(in_fused(us=2.0)), "us must be a list"),
    "us of another count": (edited(in_fused(us=[2.0, 2.0, 2.0])), "figures of the same passes"),
    "why and figures": (edited(in_fused(why="failed")), "not both"),
    "why of no words": (edited(in_fused(why=3)), "why must be text"),
    "config unknown": (edited(in_fused(config={"waves": 2})), r"unknown \['waves'\]"),
    "config refused": (edited(in_fused(config={"block_v": 24})), "block_v must be one of"),
    "config of another kernel": (edited(in_fused(config={"state_first": True})), "state_first needs rows_per_thread"),
    "config true": (edited(in_fused(config={"num_warps": True})), "num_warps must be an int"),
    "config no object": (edited(in_fused(config=[64, 8])), "config must be an object"),
    "gluon on ROCm": (edited(lambda d: d.update(arch="hip")), "a kernel for NVIDIA GPUs, and arch is 'hip'"),
    "pdl on sm80": (
        edited(lambda d: (d.update(arch="sm80"), in_fused(config={"pdl": True})(d))), "has pdl=true, which sm80"
    ),
    "gluon chunk of 9": (edited(in_cell(form="chunked", T=9)), "takes up to T=8 in form 'chunked'"),
    "closed for no reason": (edited(in_cell(closed={})), "closed must have the keys"),
    "closed by nobody": (
        edited(in_cell(closed=dict(history="h", commits=[], unfused_us=[], fused_us=[], date="d"))), "closed.commits"
    ),
    "closed by NaN": (
        edited(in_cell(closed=dict(history="h", commits=["a"], unfused_us=[-1], fused_us=[1], date="d"))),
        "closed.unfused_us must hold",
    ),
}  # fmt: skip
