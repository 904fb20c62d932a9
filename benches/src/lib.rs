//! Benchmarks of qhx: host time per token, overhead against other runtimes
