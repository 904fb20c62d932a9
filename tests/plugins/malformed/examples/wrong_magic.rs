//! Exports the symbol that hosts look for, with something else behind it.

#![expect(unsafe_code, reason = "exports a symbol under a fixed name")]

/// A root with a wrong header, at least as long as the real one, so that reading one finds something.
// SAFETY: no other item of this library has the name.
#[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
pub static ROOT: [u8; 4096] = [0x5a; 4096];
