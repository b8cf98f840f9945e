"""What the datasheets promise: the figures to compare a measurement with, each GPU's with its source.

Tensor figures are dense (many datasheets print the sparse ones, twice as high), with float32 accumulation, which is
what PyTorch's matrix products use. A figure that no source gave is None, never a guess. No GPU sustains these peaks: a
T4 reaches about 24 of its 65 float16 TFLOPS in a 4096 x 4096 product (forums.developer.nvidia.com/t/264462).
Compute capabilities: developer.nvidia.com/cuda-gpus and developer.nvidia.com/cuda-legacy-gpus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from course_utils.views import gibibytes, html_table, number, text_table

_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/"
_T4 = _NVIDIA + "tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_P100 = _NVIDIA + "tesla-p100/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf"
_A100 = _NVIDIA + "a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_A10 = _NVIDIA + "a10/pdf/a10-datasheet.pdf"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_IMAGES = "https://images.nvidia.com/aem-dam/"
_GA102 = _IMAGES + "en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
_PRO_PAGE = "https://www.nvidia.com/en-us/data-center/rtx-pro-6000-blackwell-server-edition/"
_TURING = "https://developer.nvidia.com/blog/nvidia-turing-architecture-in-depth/"
_BLACKWELL = _IMAGES + "Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"


@dataclass(frozen=True)
class GpuSpec:
    """One GPU's datasheet. TFLOPS are 10^12 operations a second, bandwidth counts 10^9 bytes as a GB.

    `memory_bytes` is the nominal size (a "16 GB" card holds 16 x 2^30 bytes); drivers report somewhat less.
    `fp16_tensor_tflops` is None without tensor cores, `bf16_tensor_tflops` without native bfloat16 (below sm_80);
    both, and `sms`, `fp32_tflops`, `tdp_watts`, are also None where no source was found.
    """

    name: str
    architecture: str
    capability: tuple[int, int]
    sms: int | None
    memory_bytes: int
    bandwidth_bytes_per_s: float
    fp32_tflops: float | None
    fp16_tensor_tflops: float | None
    bf16_tensor_tflops: float | None
    tdp_watts: float | None
    source: str

    def __repr__(self) -> str:
        return text_table(("Datasheet", self.name), self._rows())

    def _repr_html_(self) -> str:
        return html_table(("Figure", "Datasheet"), self._rows(), caption=self.name)

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("architecture", f"{self.architecture}, sm_{self.capability[0]}{self.capability[1]}"),
            ("multiprocessors", number(self.sms)),
            ("memory", gibibytes(self.memory_bytes)),
            ("bandwidth", number(self.bandwidth_bytes_per_s / 1e9, "GB/s")),
            ("float32", number(self.fp32_tflops, "TFLOPS", 1)),
            ("float16, tensor cores", number(self.fp16_tensor_tflops, "TFLOPS", 1)),
            ("bfloat16, tensor cores", number(self.bf16_tensor_tflops, "TFLOPS", 1)),
            ("power limit", number(self.tdp_watts, "W")),
            ("source", self.source),
        ]


def _spec(
    name: str,
    architecture: str,
    capability: tuple[int, int],
    sms: int | None,
    gigabytes: int,
    gigabytes_per_s: float,
    fp32: float | None,
    fp16: float | None,
    bf16: float | None,
    watts: float | None,
    source: str,
) -> GpuSpec:
    memory_bytes, bandwidth = gigabytes * 2**30, gigabytes_per_s * 1e9
    return GpuSpec(name, architecture, capability, sms, memory_bytes, bandwidth, fp32, fp16, bf16, watts, source)


# The figures whose datasheet prints only the sparse one are halved: L4 242, H100 SXM and H200 1,979, H100 PCIe 1,513.
# float32 of the RTX 5080 and 5090 is 2 x cores x boost clock, as the whitepaper counts it.
# name, architecture, capability, SMs, GB, GB/s, float32, float16, bfloat16, W, source
SPECS: tuple[GpuSpec, ...] = (
    _spec("Tesla T4", "Turing", (7, 5), 40, 16, 320, 8.1, 65, None, 70, _T4),
    _spec("Tesla P100-PCIE-16GB", "Pascal", (6, 0), 56, 16, 732, 9.3, None, None, 250, _P100),
    _spec("Tesla V100-SXM2-16GB", "Volta", (7, 0), 80, 16, 900, 15.7, 125, None, 300, _V100),
    _spec("Tesla V100-SXM2-32GB", "Volta", (7, 0), 80, 32, 900, 15.7, 125, None, 300, _V100),
    _spec("Tesla V100-PCIE-16GB", "Volta", (7, 0), 80, 16, 900, 14, 112, None, 250, _V100),
    _spec("Tesla V100-PCIE-32GB", "Volta", (7, 0), 80, 32, 900, 14, 112, None, 250, _V100),
    _spec("NVIDIA L4", "Ada", (8, 9), None, 24, 300, 30.3, 121, 121, 72, _L4),
    _spec("NVIDIA A10", "Ampere", (8, 6), None, 24, 600, 31.2, 125, 125, 150, _A10),
    _spec("NVIDIA A10G", "Ampere", (8, 6), None, 24, 600, None, 70, None, None, _A10G),
    _spec("NVIDIA A100-SXM4-40GB", "Ampere", (8, 0), 108, 40, 1555, 19.5, 312, 312, 400, _A100),
    _spec("NVIDIA A100-PCIE-40GB", "Ampere", (8, 0), 108, 40, 1555, 19.5, 312, 312, 250, _A100),
    _spec("NVIDIA A100-SXM4-80GB", "Ampere", (8, 0), 108, 80, 2039, 19.5, 312, 312, 400, _A100),
    _spec("NVIDIA A100 80GB PCIe", "Ampere", (8, 0), 108, 80, 1935, 19.5, 312, 312, 300, _A100),
    _spec("NVIDIA H100 80GB HBM3", "Hopper", (9, 0), 132, 80, 3350, 67, 989.5, 989.5, 700, _H100),
    _spec("NVIDIA H100 PCIe", "Hopper", (9, 0), 114, 80, 2000, 51, 756.5, 756.5, 350, _H100),
    _spec("NVIDIA H200", "Hopper", (9, 0), 132, 141, 4800, 67, 989.5, 989.5, 700, _H200),
    _spec("NVIDIA GeForce RTX 2080 Ti", "Turing", (7, 5), 68, 11, 616, 13.4, 53.8, None, 250, _TURING),
    _spec("NVIDIA GeForce RTX 3090", "Ampere", (8, 6), 82, 24, 936, 35.6, 71, None, 350, _GA102),
    _spec("NVIDIA GeForce RTX 4090", "Ada", (8, 9), 128, 24, 1008, 82.6, 165.2, 165.2, 450, _BLACKWELL),
    _spec("NVIDIA GeForce RTX 5080", "Blackwell", (12, 0), 84, 16, 960, 56.3, 112.6, 112.6, 360, _BLACKWELL),
    _spec("NVIDIA GeForce RTX 5090", "Blackwell", (12, 0), 170, 32, 1792, 104.8, 209.5, 209.5, 575, _BLACKWELL),
    _spec(_PRO, "Blackwell", (12, 0), None, 96, 1597, None, None, None, 600, _PRO_PAGE),
)

# Names that some drivers and clouds use for the same board.
_OTHER_NAMES = {"A100-SXM-80GB": "NVIDIA A100-SXM4-80GB", "A100-PCIE-80GB": "NVIDIA A100 80GB PCIe"}


def spec_for(name: str | None) -> GpuSpec | None:
    """The datasheet of the GPU that NVML, nvidia-smi or torch calls `name`, or None where this table has none.

    Vendor prefixes, case, spaces and hyphens do not matter: "Tesla T4", "NVIDIA T4" and "t4" are the same card. Nothing
    else is guessed: "T400" is no T4, "A100" alone could be any of four boards, a laptop's or a MIG slice's name is
    another device, and all of these give None.
    """
    return _BY_KEY.get(_key(name)) if name else None


def _key(name: str) -> str:
    words = re.sub(r"[\s_-]+", " ", name).strip().lower().split(" ")
    while len(words) > 1 and words[0] in {"nvidia", "tesla", "geforce"}:
        words = words[1:]
    return " ".join(words)


_BY_NAME = {spec.name: spec for spec in SPECS}
_BY_KEY = {_key(name): spec for name, spec in _BY_NAME.items()} | {
    _key(other): _BY_NAME[name] for other, name in _OTHER_NAMES.items()
}
