"""A text of every kind of array, for programs that are kept, and for objects beside them."""

from __future__ import annotations

from reference.language import Array, Column, Line, Part, Record, Settings, Table, Text

TEXT = Text(__name__)


class Account(Record):
    """An account; `before`: the one that was paid before it."""

    sum: int
    before: Account
    last: Line[int]


class Rates(Settings):
    """The cost of a payment."""

    fee: int


class Ledger(Part):
    """Accounts, how often each was paid, and the order in which they were."""

    accounts: Table[Account]
    payments: Column[Account, int]
    paid: Array[Account]
    rates: Rates
    count: int
    latest: Account


def pay(c: Ledger, number: int, amount: int) -> None:
    """Pays an amount, less the fee."""
    account = c.accounts[number]
    account.sum += amount - c.rates.fee
    account.before = c.latest
    account.last[c.count % 2] = amount
    c.payments[account] += 1
    c.paid[c.count] = account
    c.latest = account
    c.count += 1
