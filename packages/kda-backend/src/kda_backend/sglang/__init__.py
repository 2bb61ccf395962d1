"""SGLang plugin: verify and commit of KDA layers by our kernels, switched on by installing this package.

SGLang calls `register` (entry point ``kda`` of the group ``sglang.srt.plugins``) in every process it starts. What it
replaces and how to see that it works: docs/sglang.md.
"""

from kda_backend.sglang.plugin import register

__all__ = ["register"]
