"""Live engines under observation: what they are asked, and what they answer, written as logs or compared at once.

The frame knows no engine: a dialect hooks into its own (`hkv.contract.dialect.Dialect.attach`) and says operations and
answers to a `Sink`, which records them or performs them on an engine of HKV's alongside.
"""
