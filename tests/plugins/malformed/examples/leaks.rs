//! Allocates a session buffer for every token and never uses it again.

use qhx_op::{Generator, Host, Op, OpDescription, OpenInfo, Result, View};
use qhx_test_malformed_plugins::{Zeros, description};

struct Leaks(Zeros);

/// Bytes for each token.
const BYTES: usize = 1 << 20;

impl Op for Leaks {
    fn describe() -> OpDescription {
        description("test_leaks")
    }

    fn open(host: &mut Host) -> Result<Self> {
        Zeros::open(host).map(Self)
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Leaks {
    qhx_op::inner_generator!(0);

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        let buffer = host.allocate(BYTES)?;
        host.bytes_mut(buffer).fill(1);
        self.0.decode(host, token)
    }
}

qhx_op::register_ops!(Leaks);
qhx_op::export_plugin!();
