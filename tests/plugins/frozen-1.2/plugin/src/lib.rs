//! `test_frozen`: the plugin of 1.0, over the tables of interface 1.2 and with what they added. A graph `step` has the
//! output `logits`, and the answer after the tokens t₁ … tₙ favours (t₁ + … + tₙ) mod vocabulary.
//!
//! An image is two tiles of one position each, which count as 3 and 5. Draft tokens are verified in steps of four, and
//! texts of up to eight tokens together are embedded in one execution.

use std::ffi::c_void;

use qhx_op::abi::{
    __call_root_module_loader, CheckTypeLayout, HostRef, LibHeader, OpModule, OpModuleRef, OpObject, OpVTable,
    OpVTableRef, PORT_OUTPUT, RResult, RSlice, RStr, RString, RawBuffer, RawError, RawResult, RawSegment, RawView,
    RootModuleResult, SEGMENT_TILE, SEGMENT_TOKENS, VIEW_F32, WithMetadata,
};
use serde_json::json;

const VOCAB: usize = 16;
/// Texts that are embedded in one execution.
const TEXTS: usize = 8;
/// Code of an error of the prompt.
const PROMPT: u32 = 7;

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

fn error<T>(code: u32, message: &str) -> RawResult<T> {
    RResult::RErr(RawError { code, message: message.into() })
}

impl Frozen {
    fn last(&self) -> u32 {
        self.sums.last().copied().unwrap_or(0)
    }

    fn execute(&self) -> RawResult<()> {
        // SAFETY: the host outlives the op.
        unsafe { self.host.vtable.execute()(self.host.data, 0) }
    }

    fn view(&self, rows: usize) -> RawView {
        RawView { buffer: self.rows.id, dtype: VIEW_F32, offset: 0, len: (rows * VOCAB) as u64 }
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

    fn consume(&mut self, numbers: &[u32]) -> RawResult<RawView> {
        for (index, &number) in numbers.iter().enumerate() {
            if let RResult::RErr(error) = self.execute() {
                return RResult::RErr(error);
            }
            self.sums.push(self.last().wrapping_add(number));
            let (done, total) = (index as u64 + 1, numbers.len() as u64);
            // SAFETY: as in `execute`.
            unsafe { self.host.vtable.progress()(self.host.data, done, total) };
        }
        self.favour(0, self.last());
        RResult::ROk(self.view(1))
    }
}

/// What the segments count as, each position for itself.
fn numbers(segments: &[RawSegment<'_>]) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for segment in segments {
        match (segment.kind, segment.rate) {
            (SEGMENT_TOKENS, _) => numbers.extend(segment.tokens.iter()),
            // The first and the second of two.
            (SEGMENT_TILE, 0x2_0000) => numbers.push(3),
            (SEGMENT_TILE, 0x2_0001) => numbers.push(5),
            _ => return None,
        }
    }
    Some(numbers)
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

unsafe extern "C" fn reset(data: *mut c_void) -> RawResult<()> {
    // SAFETY: an open op, here and below.
    unsafe { op(data) }.sums.clear();
    RResult::ROk(())
}

unsafe extern "C" fn prefill(data: *mut c_void, segments: RSlice<'_, RawSegment<'_>>) -> RawResult<RawView> {
    match numbers(segments.as_slice()) {
        Some(numbers) => unsafe { op(data) }.consume(&numbers),
        None => error(PROMPT, "text and tiles only"),
    }
}

unsafe extern "C" fn decode(data: *mut c_void, token: u32) -> RawResult<RawView> {
    unsafe { op(data) }.consume(&[token])
}

unsafe extern "C" fn position(data: *mut c_void) -> u64 {
    unsafe { op(data) }.sums.len() as u64
}

unsafe extern "C" fn truncate(data: *mut c_void, position: u64) -> RawResult<()> {
    unsafe { op(data) }.sums.truncate(position as usize);
    RResult::ROk(())
}

unsafe extern "C" fn snapshot(data: *mut c_void) -> RawResult<u64> {
    let op = unsafe { op(data) };
    op.saved.push(op.sums.clone());
    RResult::ROk(op.saved.len() as u64 - 1)
}

unsafe extern "C" fn restore(data: *mut c_void, snapshot: u64) -> RawResult<()> {
    let op = unsafe { op(data) };
    match op.saved.get(snapshot as usize) {
        Some(saved) => op.sums.clone_from(saved),
        None => return error(PROMPT, "an unknown snapshot"),
    }
    RResult::ROk(())
}

unsafe extern "C" fn drop_snapshot(_data: *mut c_void, _snapshot: u64) {}

unsafe extern "C" fn embed(data: *mut c_void, segments: RSlice<'_, RawSegment<'_>>) -> RawResult<RawView> {
    unsafe { op(data) }.sums.clear();
    unsafe { prefill(data, segments) }
}

unsafe extern "C" fn place(_data: *mut c_void, _segment: RawSegment<'_>) -> RawResult<RString> {
    let tile = |index| json!({"part": {"token": 15, "positions": 1, "part": [index, 2]}});
    RResult::ROk(json!({"marker": 15, "pieces": [tile(0), tile(1)]}).to_string().into())
}

unsafe extern "C" fn verify(data: *mut c_void, tokens: RSlice<'_, u32>) -> RawResult<()> {
    let op = unsafe { op(data) };
    op.drafts = tokens.to_vec();
    op.execute()
}

unsafe extern "C" fn row_logits(data: *mut c_void, row: u64) -> RawResult<RawView> {
    let op = unsafe { op(data) };
    let Some(tokens) = op.drafts.get(..=row as usize) else {
        return error(PROMPT, "a row behind the draft tokens");
    };
    let sum = tokens.iter().fold(op.last(), |sum, token| sum.wrapping_add(*token));
    op.favour(0, sum);
    RResult::ROk(op.view(1))
}

unsafe extern "C" fn accept(data: *mut c_void, count: u64) -> RawResult<()> {
    let op = unsafe { op(data) };
    for token in op.drafts.drain(..).take(count as usize).collect::<Vec<_>>() {
        op.sums.push(op.last().wrapping_add(token));
    }
    RResult::ROk(())
}

unsafe extern "C" fn embed_many(data: *mut c_void, texts: RSlice<'_, RSlice<'_, u32>>) -> RawResult<RawView> {
    let op = unsafe { op(data) };
    if texts.len() > TEXTS {
        return error(PROMPT, "too many texts");
    }
    if let RResult::RErr(error) = op.execute() {
        return RResult::RErr(error);
    }
    for (row, text) in texts.iter().enumerate() {
        op.favour(row, text.iter().sum());
    }
    RResult::ROk(op.view(texts.len()))
}

const CALLS: OpVTableRef = {
    const STATIC: &WithMetadata<OpVTable> = &WithMetadata::new(OpVTable {
        close,
        info,
        reset,
        prefill,
        decode,
        position,
        truncate,
        snapshot,
        restore,
        drop_snapshot,
        embed,
        place,
        verify,
        row_logits,
        accept,
        embed_many,
    });
    OpVTableRef(STATIC.static_as_prefix())
};

extern "C" fn describe() -> RString {
    json!([{
        "name": "test_frozen", "summary": "built against interface 1.2", "version": "1.2.0",
        "tasks": ["generate", "embed"], "modalities": ["text", "image"], "params_schema": {"type": "object"},
    }])
    .to_string()
    .into()
}

unsafe extern "C" fn open(_name: RStr<'_>, host: HostRef) -> RawResult<OpObject> {
    let rows = unsafe { host.vtable.allocate()(host.data, (TEXTS * VOCAB * 4) as u64) };
    let rows = match rows {
        RResult::ROk(rows) => rows,
        RResult::RErr(error) => return RResult::RErr(error),
    };
    if let RResult::RErr(error) = unsafe { host.vtable.bind()(host.data, 0, PORT_OUTPUT, 0, rows.id, 0) } {
        return RResult::RErr(error);
    }
    unsafe { host.vtable.log()(host.data, 4, "opened".into()) };
    let op = Frozen { host, rows, sums: Vec::new(), drafts: Vec::new(), saved: Vec::new() };
    RResult::ROk(OpObject { data: Box::into_raw(Box::new(op)).cast(), vtable: CALLS })
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
