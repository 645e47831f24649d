"""The text of a plan in Chinese: its labels and headlines. JSON, notes and errors stay as they are."""

from __future__ import annotations

import re
from unicodedata import east_asian_width

CHINESE = {
    "fits": "放得下",
    "does not fit": "放不下",
    "needs": "需要",
    "{verdict}: {peak:.2f} GiB{room}, {layout}": "{verdict}：{peak:.2f} GiB{room}，{layout}",
    " of {room:.1f} GiB that tensors may take on {device}": "，{device} 上张量可用 {room:.1f} GiB",
    "predicted: {step:.3g} s a step, {speed:,.0f} tokens/s, MFU {mfu:.1%}; {tokens:,} tokens in {days:.3g} days with "
    "{kwh:,.3g} kWh (goodput {goodput:.1%})": "预测：每步 {step:.3g} s，{speed:,.0f} token/s，MFU {mfu:.1%}；训练 "
    "{tokens:,} 个 token 需 {days:.3g} 天、{kwh:,.3g} kWh（有效训练时间占比 {goodput:.1%}）",
    "of a step: {shares}": "一步的时间构成：{shares}",
    "one process": "单进程",
    "GiB at the peak": "峰值时各项（GiB）",
    "stage {first}": "流水线阶段 {first}",
    "stages {first} to {last}": "流水线阶段 {first}–{last}",
    "weights": "权重",
    "gradients": "梯度",
    "optimizer": "优化器",
    "activations": "激活",
    "communication": "通信",
    "libraries": "库",
    "peak": "峰值",
    "between": "步间常驻",
    "The peak is in the {moment}. The largest tensors then:": "峰值出现在{moment}。此时最大的张量：",
    "note: {note}": "注：{note}",
    "products": "矩阵乘",
    "memory": "访存",
    "launches": "kernel 启动",
    "bubble": "流水线气泡",
    "{flags} ({name}) would need {saved:.2f} GiB less{enough}": "加 {flags}（{name}）可省 {saved:.2f} GiB{enough}",
    ", and would fit": "，这样放得下",
    ", and would not fit": "，仍然放不下",
    "sequence parallelism": "序列并行",
    "a smaller micro-batch": "减小 micro-batch",
    "recomputation of activations": "激活重计算",
    "The fastest of {number} layouts that fit:": "放得下的布局共 {number} 种，最快的几种：",
    "layout": "布局",
    "s a step": "秒/步",
    "flags": "参数",
    "Beside the first:": "与第一种相比：",
    "Start the first with:": "启动第一种：",
    "Start it on each host, with its own --node-rank:": "在每台主机上启动它，--node-rank 各不相同：",
    "In {hours:g} hours on {number} x {device}, of {unique:.3g} tokens of text:": "{number} x {device} 训练 {hours:g} "
    "小时，文本共 {unique:.3g} 个 token：",
    "parameters": "参数量",
    "tokens": "token 数",
    "epochs": "遍数",
    "loss by the law": "定律预测的损失",
    "Train the first; started now it ends on {end:%Y-%m-%d at %H:%M}, without evaluations and "
    "saves:": "建议训练第一个；现在启动，不计评估和保存，将于 {end:%Y-%m-%d %H:%M} 结束：",
    "Put your data and tokenizer in place of --mock-data and NullTokenizer.": "请把 --mock-data 和 NullTokenizer "
    "换成你的数据和分词器。",
}
_MOMENTS = {
    "forward pass": "前向传播",
    "backward pass": "反向传播",
    "weight gradients": "权重梯度的计算",
    "update of the weights": "权重更新",
    "reduction of the gradients": "梯度规约",
    r" at (?:layer|group of layers) (\d+) of (\d+)": r"的第 \1 层（组），共 \2",
    r", with (\d+) other micro-batches under way": r"，另有 \1 个 micro-batch 尚未完成反向",
}


class Words:
    """The texts of a language, "en" or "zh"."""

    def __init__(self, language: str = "en") -> None:
        self.is_chinese = language == "zh"

    def __call__(self, text: str, **values: object) -> str:
        """Return a text with its values."""
        return (CHINESE.get(text, text) if self.is_chinese else text).format(**values)

    def moment(self, text: str) -> str:
        """Return the moment of a peak."""
        for pattern, chinese in _MOMENTS.items() if self.is_chinese else ():
            text = re.sub(pattern, chinese, text)
        return text


def width(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


def right(text: str, columns: int) -> str:
    """Return a text moved to the right of some columns."""
    return " " * (columns - width(text)) + text


def left(text: str, columns: int) -> str:
    """Return a text filled up to some columns."""
    return text + " " * (columns - width(text))
