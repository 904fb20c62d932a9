//! Calling an open op, from the host's side, and how the words of the list of calls cross.

#![expect(unsafe_code, reason = "calls an op's vtable")]

use qhx_types::calls::{Bytes, Number, Segments, SnapshotId, Texts, Token, Tokens};
use qhx_types::{Answer, Placement, Segment};
use serde::de::DeserializeOwned;

use crate::abi::{
    OpObject, RResult, RSlice, RString, RVec, RawError, RawResult, RawSegment, RawView,
};

/// Why a call of an op gives nothing.
#[derive(Debug)]
pub enum CallError {
    /// The op is of an interface before the version that the call came with.
    Absent(&'static str),
    /// The error of the op.
    Failed(RawError),
    /// The op returned JSON that is not what the call returns.
    Invalid(serde_json::Error),
}

/// An argument, by its word, as it goes out.
macro_rules! lower {
    (Token $token:ident) => {
        $token
    };
    (Number $number:ident) => {
        $number as u64
    };
    (SnapshotId $snapshot:ident) => {
        $snapshot.0
    };
    (Tokens $tokens:ident) => {
        RSlice::from_slice($tokens)
    };
    (Bytes $bytes:ident) => {
        RSlice::from_slice($bytes)
    };
    (Texts $texts:ident) => {
        RSlice::from_slice(
            &$texts.iter().map(|&text| text.into()).collect::<Vec<RSlice<'_, u32>>>(),
        )
    };
    (Segment $segment:ident) => {
        RawSegment::from($segment)
    };
    (Segments $segments:ident) => {
        RSlice::from_slice(
            &$segments.iter().map(|&one| one.into()).collect::<Vec<RawSegment<'_>>>(),
        )
    };
}

/// An argument, by its word, as it comes in.
macro_rules! lift {
    (Token $token:ident) => {
        $token
    };
    (Number $number:ident) => {
        $number as usize
    };
    (SnapshotId $snapshot:ident) => {
        $crate::SnapshotId($snapshot)
    };
    (Tokens $tokens:ident) => {
        $tokens.as_slice()
    };
    (Bytes $bytes:ident) => {
        $bytes.as_slice()
    };
    (Texts $texts:ident) => {
        &$texts.iter().map(|text| text.as_slice()).collect::<Vec<&[u32]>>()
    };
    (Segment $segment:ident) => {
        &$crate::Segment::from(&$segment)
    };
    (Segments $segments:ident) => {
        &$segments.iter().map($crate::Segment::from).collect::<Vec<_>>()
    };
}
pub(crate) use lift;

/// The function of a call: every op has those of 1.0.
macro_rules! function {
    (1.0 $vtable:expr, $name:ident) => {
        $vtable.$name()
    };
    ($since:tt $vtable:expr, $name:ident) => {
        match $vtable.$name() {
            Some(function) => function,
            None => return Err(CallError::Absent(stringify!($since))),
        }
    };
}

/// Method by which the host makes a call, by the kind of the call's result.
macro_rules! method {
    ($docs:tt [] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! { @ $docs (()) $since $name($($argument)*) $raw, |nothing: ()| nothing }
    };
    ($docs:tt [Position] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! { @ $docs (usize) $since $name($($argument)*) $raw, |position: u64| position as usize }
    };
    ($docs:tt [Done] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! { @ $docs (Result<(), CallError>) $since $name($($argument)*) $raw, plain }
    };
    ($docs:tt [Saved] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! {
            @ $docs (Result<SnapshotId, CallError>) $since $name($($argument)*) $raw,
            |raw| plain(raw).map(SnapshotId)
        }
    };
    ($docs:tt [Exported] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! {
            @ $docs (Result<Vec<u8>, CallError>) $since $name($($argument)*) $raw,
            |raw| plain(raw).map(RVec::into_vec)
        }
    };
    ($docs:tt [Placed] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! {
            @ $docs (Result<Placement, CallError>) $since $name($($argument)*) $raw, parsed
        }
    };
    ($docs:tt [Answered] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! {
            @ $docs (Result<Answer, CallError>) $since $name($($argument)*) $raw, parsed
        }
    };
    ($docs:tt [Noted] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! {
            @ $docs (Result<serde_json::Value, CallError>) $since $name($($argument)*) $raw, parsed
        }
    };
    ($docs:tt [$view:ident] $since:tt $name:ident($($argument:tt)*) $raw:tt) => {
        method! { @ $docs (Result<RawView, CallError>) $since $name($($argument)*) $raw, plain }
    };
    (@ [$(#$doc:tt)*] ($result:ty) $since:tt $name:ident($($arg:ident: $ty:ty),*) [$($raw:expr),*], $finish:expr) => {
        $(#$doc)*
        ///
        /// # Safety
        /// The op is open, and no other call of it is under way.
        ///
        /// # Errors
        /// For a call that can fail: the op fails, or its interface is older than the call.
        pub unsafe fn $name(&self $(, $arg: $ty)*) -> $result {
            let function = function!($since self.vtable, $name);
            // SAFETY: the caller's contract.
            let raw = unsafe { function(self.data $(, $raw)*) };
            ($finish)(raw)
        }
    };
}

macro_rules! methods {
    ($({
        $(#$doc:tt)*
        since $since:tt, $part:ident: $name:ident($($arg:ident: $word:ident $(<$($life:lifetime),+>)?),*) $(-> $gives:ident)?,
        $($rest:tt)*
    })*) => {
        impl OpObject {
            $(method! {
                [$(#$doc)*] [$($gives)?] $since
                $name($($arg: $word $(<$($life),+>)?),*) [$(lower!($word $arg)),*]
            })*
        }
    };
}

qhx_types::op_calls! { methods }

fn plain<T>(raw: RawResult<T>) -> Result<T, CallError> {
    match raw {
        RResult::ROk(value) => Ok(value),
        RResult::RErr(error) => Err(CallError::Failed(error)),
    }
}

fn parsed<T: DeserializeOwned>(raw: RawResult<RString>) -> Result<T, CallError> {
    serde_json::from_str(&plain(raw)?).map_err(CallError::Invalid)
}
