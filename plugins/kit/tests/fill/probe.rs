//! An op whose opening and whose step are closures of the test.

use std::cell::RefCell;

use qhx_op::harness::{OpHarness, OpenOp};
use qhx_op::{DType, Error, Generator, Host, Op, OpDescription, OpenInfo, Result, Segment, View};

/// Work of one token.
pub type Step = Box<dyn FnMut(&mut Host, u32) -> Result<()> + Send>;

type Open = Box<dyn FnOnce(&mut Host) -> Result<Step>>;

thread_local!(static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) });

struct Probe {
    step: Step,
    logits: View,
    position: usize,
}

impl Op for Probe {
    fn describe() -> OpDescription {
        OpDescription { name: "probe".into(), ..OpDescription::default() }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let open = OPEN.with_borrow_mut(Option::take).ok_or_else(|| Error::prompt("no closure"))?;
        let step = open(host)?;
        Ok(Self { step, logits: host.allocate_view(DType::F32, 1)?, position: 0 })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: 1, max_ctx: 64, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Probe {
    fn reset(&mut self, _: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, host: &mut Host, _: &[Segment<'_>]) -> Result<View> {
        self.decode(host, 0)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        (self.step)(host, token)?;
        self.position += 1;
        Ok(self.logits)
    }
}

/// Opens the op over a harness: `open` binds, and gives what each decoded token does.
pub fn probe(
    harness: OpHarness,
    open: impl FnOnce(&mut Host) -> Result<Step> + 'static,
) -> Result<OpenOp> {
    OPEN.set(Some(Box::new(open)));
    harness.open::<Probe>()
}

/// Opens an op that does nothing in a step.
pub fn opened(
    harness: OpHarness,
    open: impl FnOnce(&mut Host) -> Result<()> + 'static,
) -> Result<OpenOp> {
    probe(harness, |host| {
        open(host)?;
        Ok(Box::new(|_, _| Ok(())))
    })
}

/// Asserts that values are finite and as expected, but for rounding.
#[track_caller]
pub fn close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (index, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f.is_finite() && (f - e).abs() <= tolerance, "{index}: {f} is not {e}: {found:?}");
    }
}
