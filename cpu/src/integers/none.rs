//! A processor whose instructions for integers are not used.

use super::{IntegerTask, Words};

pub(super) const LIMIT: f32 = 32767.0;
pub(super) const PANEL: usize = 1;

/// There is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {}

pub(super) enum Group {}
pub(super) enum Panel {}

impl Level {
    pub(super) fn found() -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    pub(super) fn fill(self, _: &mut Words, _: &[f32], _: usize) -> bool {
        match self {}
    }

    pub(super) fn few(self, _: &mut IntegerTask<'_, '_>, _: &[Group]) {
        match self {}
    }

    pub(super) fn several(self, _: &mut IntegerTask<'_, '_>, _: &[Panel]) {
        match self {}
    }

    pub(super) fn groups(self, _: &Words, _: bool) -> Vec<Group> {
        match self {}
    }

    pub(super) fn panel(self, _: &Words) -> Panel {
        match self {}
    }
}
