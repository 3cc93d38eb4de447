"""Everything that HKV asks of a dialect: protocols and value types, which import nothing above kinds and models."""
