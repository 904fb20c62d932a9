//! Allocates a session buffer for every token and never uses it again.

use qhx_op::{Generator, Host, Op, OpDescription, OpenInfo, Result, Segment, View};
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
    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.0.reset();
        Ok(())
    }

    fn position(&self) -> usize {
        self.0.position()
    }

    fn prefill(&mut self, _host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.0.prefill(segments)
    }

    fn decode(&mut self, host: &mut Host, _token: u32) -> Result<View> {
        let buffer = host.allocate(BYTES)?;
        host.bytes_mut(buffer).fill(1);
        Ok(self.0.decode())
    }
}

qhx_op::register_ops!(Leaks);
qhx_op::export_plugin!();
