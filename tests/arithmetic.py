"""Evaluates a sum written out by hand: integers, `+ - * /` and brackets, exactly."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(text: str) -> Fraction:
    """The value of a sum."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp), ast.dump(node)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)
