//! `test_frozen`: a plugin over the tables of interface 1.0. A graph `step` has the output `logits`, and the answer
//! after the tokens t₁ … tₙ favours (t₁ + … + tₙ) mod vocabulary.
//!
//! An image is two tiles of one position each, which count as 3 and 5. Draft tokens are verified in steps of four, and
//! texts of up to eight tokens together are embedded in one execution.

#[cfg(feature = "other-allocator")]
mod allocator;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use qhx_op::abi::{
    __call_root_module_loader, CheckTypeLayout, HostRef, LibHeader, OpModule, OpModuleRef, OpObject, OpVTable,
    OpVTableRef, PORT_OUTPUT, RResult, RStr, RString, RawBuffer, RawCall, RawError, RawReply, RawResult, RawSegment,
    RootModuleResult, SEGMENT_TILE, SEGMENT_TOKENS, VIEW_F32, WithMetadata,
};
use serde_json::json;

const VOCAB: usize = 16;
/// Texts that are embedded in one execution.
const TEXTS: usize = 8;
/// Codes of errors: of the prompt, of a call that the op does not have, of a panic.
const PROMPT: u32 = 4;
const UNSUPPORTED: u32 = 7;
const PANIC: u32 = 8;

struct Frozen {
    host: HostRef,
    /// Rows of `VOCAB` values: of logits the first one, of vectors one a text.
    rows: RawBuffer,
    sums: Vec<u32>,
    drafts: Vec<u32>,
    saved: Vec<Vec<u32>>,
}

/// The op behind `data`.
unsafe fn op<'a>(data: *mut c_void) -> &'a mut Frozen {
    // SAFETY: made in `open`; the host makes one call at a time.
    unsafe { &mut *data.cast::<Frozen>() }
}

fn error(code: u32, message: &str) -> RawError {
    RawError { code, message: message.into(), token: 0 }
}

impl Frozen {
    fn last(&self) -> u32 {
        self.sums.last().copied().unwrap_or(0)
    }

    /// An error of the host goes back as it is, with its number.
    fn execute(&self) -> Result<(), RawError> {
        // SAFETY: the host outlives the op.
        unsafe { self.host.vtable.execute()(self.host.data, 0) }.into_result()
    }

    /// The first rows as the reply.
    fn rows(&self, rows: usize) -> RawReply {
        let mut reply = RawReply::default();
        (reply.view.buffer, reply.view.dtype) = (self.rows.id, VIEW_F32);
        reply.view.len = (rows * VOCAB) as u64;
        reply
    }

    /// Writes a row with a 1 at the place of a sum.
    fn favour(&mut self, row: usize, sum: u32) {
        let first = self.rows.data.cast::<f32>();
        for at in 0..VOCAB {
            let value = if at == sum as usize % VOCAB { 1.0 } else { 0.0 };
            // SAFETY: the buffer has `TEXTS` rows, is aligned for u64, and nobody else looks at it.
            unsafe { first.add(row * VOCAB + at).write(value) };
        }
    }

    fn consume(&mut self, numbers: &[u32]) -> Result<RawReply, RawError> {
        for (index, &number) in numbers.iter().enumerate() {
            assert!(number != 13, "token 13 goes wrong");
            self.execute()?;
            self.sums.push(self.last().wrapping_add(number));
            let (done, total) = (index as u64 + 1, numbers.len() as u64);
            // SAFETY: as in `execute`.
            unsafe { self.host.vtable.progress()(self.host.data, done, total) };
        }
        self.favour(0, self.last());
        Ok(self.rows(1))
    }

    fn answer(&mut self, call: RawCall<'_>) -> Result<RawReply, RawError> {
        let number = call.number as usize;
        let mut reply = RawReply::default();
        match call.name.as_str() {
            "reset" => self.sums.clear(),
            "prefill" => return self.consume(&numbers(call.segments.as_slice())?),
            "decode" => return self.consume(&[call.number as u32]),
            "truncate" => self.sums.truncate(number),
            "snapshot" => {
                self.saved.push(self.sums.clone());
                reply.number = self.saved.len() as u64 - 1;
            }
            "restore" => match self.saved.get(number) {
                Some(saved) => self.sums.clone_from(saved),
                None => return Err(error(PROMPT, "an unknown snapshot")),
            },
            "drop_snapshot" => {}
            "verify" => {
                self.drafts = call.tokens.to_vec();
                self.execute()?;
            }
            "row_logits" => {
                let Some(tokens) = self.drafts.get(..=number) else {
                    return Err(error(PROMPT, "a row behind the draft tokens"));
                };
                let sum = tokens.iter().fold(self.last(), |sum, token| sum.wrapping_add(*token));
                self.favour(0, sum);
                return Ok(self.rows(1));
            }
            "accept" => {
                for token in self.drafts.drain(..).take(number).collect::<Vec<_>>() {
                    self.sums.push(self.last().wrapping_add(token));
                }
            }
            "export_state" => reply.bytes = self.sums.iter().map(|&sum| sum as u8).collect(),
            "import_state" => self.sums = call.bytes.iter().map(|&sum| u32::from(sum)).collect(),
            "note" => {
                reply.bytes = json!({"sum": self.last()}).to_string().into_bytes().into();
            }
            "embed" => {
                self.sums.clear();
                return self.consume(&numbers(call.segments.as_slice())?);
            }
            "embed_many" => {
                if call.texts.len() > TEXTS {
                    return Err(error(PROMPT, "too many texts"));
                }
                self.execute()?;
                for (row, text) in call.texts.iter().enumerate() {
                    self.favour(row, text.iter().sum());
                }
                return Ok(self.rows(call.texts.len()));
            }
            other => return Err(error(UNSUPPORTED, other)),
        }
        Ok(reply)
    }
}

/// What the segments count as, each position for itself.
fn numbers(segments: &[RawSegment<'_>]) -> Result<Vec<u32>, RawError> {
    let mut numbers = Vec::new();
    for segment in segments {
        match (segment.kind, segment.rate) {
            (SEGMENT_TOKENS, _) => numbers.extend(segment.tokens.iter()),
            // The first and the second of two.
            (SEGMENT_TILE, 0x2_0000) => numbers.push(3),
            (SEGMENT_TILE, 0x2_0001) => numbers.push(5),
            _ => return Err(error(PROMPT, "text and tiles only")),
        }
    }
    Ok(numbers)
}

unsafe extern "C" fn close(data: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `open`; the host closes once.
    drop(unsafe { Box::from_raw(data.cast::<Frozen>()) });
}

unsafe extern "C" fn info(_data: *mut c_void) -> RString {
    let info = json!({
        "vocab": VOCAB, "max_ctx": 64, "embedding_dim": VOCAB, "can_truncate": true, "can_snapshot": true,
        "verification": {"widths": [4]}, "packing": {"buckets": [{"rows": TEXTS, "cost": 1.0}]},
    });
    info.to_string().into()
}

unsafe extern "C" fn position(data: *mut c_void) -> u64 {
    // SAFETY: an open op.
    unsafe { op(data) }.sums.len() as u64
}

unsafe extern "C" fn place(_data: *mut c_void, _segment: RawSegment<'_>) -> RawResult<RString> {
    let tile = |index| json!({"part": {"token": 15, "positions": 1, "part": [index, 2]}});
    RResult::ROk(json!({"marker": 15, "pieces": [tile(0), tile(1)]}).to_string().into())
}

unsafe extern "C" fn call(data: *mut c_void, call: RawCall<'_>) -> RawResult<RawReply> {
    // SAFETY: an open op.
    let op = unsafe { op(data) };
    match catch_unwind(AssertUnwindSafe(|| op.answer(call))) {
        Ok(result) => result.into(),
        Err(_) => RResult::RErr(error(PANIC, "token 13 goes wrong")),
    }
}

const FUNCTIONS: OpVTableRef = {
    const STATIC: &WithMetadata<OpVTable> = &WithMetadata::new(OpVTable { close, info, position, place, call });
    OpVTableRef(STATIC.static_as_prefix())
};

extern "C" fn describe() -> RString {
    json!([{
        "name": "test_frozen", "summary": "built against interface 1.0", "version": "1.0.0",
        "tasks": ["generate", "embed"], "modalities": ["text", "image"], "params_schema": {"type": "object"},
    }])
    .to_string()
    .into()
}

unsafe extern "C" fn open(_name: RStr<'_>, host: HostRef) -> RawResult<OpObject> {
    let (data, services) = (host.data, host.vtable);
    let bound = || {
        // SAFETY: the host's services, here and below.
        let rows = unsafe { services.allocate()(data, (TEXTS * VOCAB * 4) as u64) }.into_result()?;
        unsafe { services.bind()(data, 0, PORT_OUTPUT, 0, rows.id, 0) }.into_result()?;
        unsafe { services.log()(data, 4, "opened".into()) };
        let op = Frozen { host, rows, sums: Vec::new(), drafts: Vec::new(), saved: Vec::new() };
        Ok(OpObject { data: Box::into_raw(Box::new(op)).cast(), vtable: FUNCTIONS })
    };
    bound().into()
}

extern "C" fn root() -> RootModuleResult {
    fn module() -> OpModuleRef {
        const STATIC: &WithMetadata<OpModule> = &WithMetadata::new(OpModule { describe, open });
        OpModuleRef(STATIC.static_as_prefix())
    }
    __call_root_module_loader(module)
}

// SAFETY: the name is the one agreed with the host, which checks the layout behind it.
#[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
pub static QHX_PLUGIN_ROOT: LibHeader = {
    // SAFETY: `root` returns an `OpModuleRef`, the type whose layout is recorded.
    unsafe { LibHeader::from_constructor::<OpModuleRef>(root, CheckTypeLayout::Yes) }
};
