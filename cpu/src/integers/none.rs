//! A processor whose instructions for integers are not used.

use super::{IntegerTask, Words};
use crate::kernels::Rows;

pub(super) const LIMIT: f32 = 32767.0;
pub(super) const PANEL: usize = 1;

/// There is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {}

pub(super) enum Group<const BYTES: usize> {}
pub(super) enum Panel<const BYTES: usize> {}

impl Level {
    pub(super) fn found() -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    pub(super) fn has_bytes(self, _: Rows<'_>, _: bool) -> bool {
        match self {}
    }

    pub(super) fn fill(self, _: &mut Words, _: &[f32], _: usize) -> bool {
        match self {}
    }

    pub(super) fn narrow(self, _: &mut [bool], _: &[f32], _: usize) {
        match self {}
    }

    pub(super) fn few<const BYTES: usize>(self, _: &mut IntegerTask<'_, '_>, _: &[Group<BYTES>]) {
        match self {}
    }

    pub(super) fn several<const BYTES: usize>(
        self,
        _: &mut IntegerTask<'_, '_>,
        _: &[Panel<BYTES>],
    ) {
        match self {}
    }

    pub(super) fn groups<const BYTES: usize>(self, _: &Words, _: Rows<'_>) -> Vec<Group<BYTES>> {
        match self {}
    }

    pub(super) fn panel<const BYTES: usize>(self, _: &Words, _: Rows<'_>) -> Panel<BYTES> {
        match self {}
    }
}
