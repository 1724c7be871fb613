//! The table of malformed and ambiguous messages. Data only; `tests/` checks the codec with it, e2e tests the gateway.
