//! Recovery from a restart of the DSP: the state is computed again from what it stands for.
//!
//! A crashed DSP may have written anything to the memory that it shares with the host: inputs that an op fills once,
//! rows of caches that masks hide, saved states. Nothing of it is trusted. The op is closed with its buffers and
//! contexts, opened again as it was when the model was opened, and given the prompt again, whose images and
//! audio are still at hand, and then the tokens of the answer one by one, as they were decoded: the text
//! goes on as if nothing had been. A restart on the way there is an error: the same step would fail for ever.
//!
//! The same way goes a state that was forgotten since no backend took it over: see [`Refused`].

use std::time::Instant;

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::workspace::Tap;

use super::model::Model;
use super::prompt::Encoded;
use super::split_op::Refused;
use crate::op::HostOp as _;

impl Model {
    /// Opens the host-op again, over the contexts that are loaded: after it [panicked](ErrorKind::Panicked), or after
    /// the [device was lost](ErrorKind::DeviceLost). Contexts that are not loaded any more are opened first, for which
    /// a device that comes back is waited for. The model is then as it was when it was opened, with nothing consumed:
    /// buffers are fresh, and what the op keeps in them is written again.
    ///
    /// A lost device needs no call of it: the next generation or embedding does so.
    ///
    /// # Errors
    /// A context or the op cannot be opened, or it was cancelled. The op is closed then until it can be opened.
    pub fn reopen(&mut self) -> Result<()> {
        // First out: buffers and contexts of both may not fit the memory.
        self.op.close();
        self.prefix.forget();
        let op = self.bundle.open_op(&mut self.space)?;
        self.op.replace(op);
        Ok(())
    }

    /// Function that is called after each execution of a graph, if any.
    pub fn tap(&self) -> Option<Tap> {
        self.space.tap.clone()
    }

    /// Opens the host-op again as [`Model::reopen`] does, and has `tap` called after each execution of a graph until it
    /// is called without one.
    ///
    /// # Errors
    /// Errors of [`Model::reopen`].
    pub fn reopen_with_tap(&mut self, tap: Option<Tap>) -> Result<()> {
        self.space.tap = tap;
        self.reopen()
    }

    /// Opens the op again where its device was lost, or where it could not be opened after that.
    pub(super) fn revive(&mut self) -> Result<()> {
        if self.space.loss.happened() || self.op.is_closed() {
            self.reopen().map_err(|e| e.context("after the DSP restarted"))?;
        }
        Ok(())
    }

    /// Makes a call that needs no state, and makes it again where the device was lost meanwhile.
    pub(super) fn twice<T>(&mut self, mut call: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        self.revive()?;
        match call(self) {
            Err(e) if self.space.loss.happened() => {
                log_loss(&e);
                self.revive()?;
                call(self).map_err(|e| self.again(e))
            }
            result => result,
        }
    }

    /// True where a call failed with `error` because the state is gone, which can be computed again.
    pub(super) fn is_lost(&self, error: &Error) -> bool {
        self.space.loss.happened() || error.is_caused_by::<Refused>()
    }

    /// Computes the state of the prompt and the answer so far again, after a call that failed with `error`.
    #[cold]
    pub(super) fn replay(&mut self, error: Error, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        match self.space.loss.happened() {
            true => log_loss(&error),
            false => tracing::warn!("{}; it is computed again", error.message()),
        }
        let start = Instant::now();
        self.revive()?;
        let result = self.try_replay(prompt, answer);
        if result.is_ok() {
            let positions = self.op.position();
            let time = start.elapsed().as_millis();
            tracing::warn!("{positions} positions were consumed again in {time} ms");
        }
        result.map_err(|e| self.again(e))
    }

    fn try_replay(&mut self, prompt: &Encoded, answer: &[u32]) -> Result<()> {
        self.consume_once(prompt, &mut 0)?;
        for &token in answer {
            self.op.decode(token)?;
            self.prefix.push(token);
        }
        Ok(())
    }

    /// An error of what was tried again.
    fn again(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Cancelled || !self.space.loss.happened() {
            return error;
        }
        error.context("the DSP restarted again, right after its contexts were opened again").hint(
            "this model, or another program, crashes the DSP: close other programs that use the NPU, and reboot \
             the device if it persists",
        )
    }
}

fn log_loss(error: &Error) {
    tracing::warn!("the DSP restarted ({}); the model is opened again", error.message());
}
