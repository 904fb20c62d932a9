//! Turns [`Op`] implementations into the functions of the interface, and collects them.

#![expect(unsafe_code, reason = "implements the raw vtable over boxed ops")]

use std::ffi::c_void;

use qhx_types::calls::Call;
use qhx_types::{Segment, SnapshotId, Verification};

use crate::abi::{
    __call_root_module_loader, CheckTypeLayout, HostRef, LibHeader, OpModule, OpModuleRef,
    OpObject, OpVTable, OpVTableRef, RResult, RStr, RString, RawCall, RawError, RawReply,
    RawResult, RawSegment, RawView, RootModuleResult, StableAbi, WithMetadata,
};
use crate::guard::catch;
use crate::host::raw_dtype;
use crate::text::{not_taken, takes};
use crate::{Encoder, Error, ErrorCode, Generator, Host, Op, OpDescription, Result, View};

/// An op that was registered with [`crate::register_ops!`].
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    describe: fn() -> OpDescription,
    open: unsafe fn(HostRef) -> Result<OpObject>,
}

inventory::collect!(Registration);

impl Registration {
    /// The registration of `O`.
    pub const fn of<O: Op>() -> Self {
        Self { describe: O::describe, open: open::<O> }
    }

    /// Declaration of the op about itself.
    pub(crate) fn describe(&self) -> OpDescription {
        (self.describe)()
    }

    /// Opens the op; a panic becomes an error.
    ///
    /// # Safety
    /// `host` stays valid as long as the op is open, and its `data` fits its vtable.
    pub(crate) unsafe fn open_guarded(&self, host: HostRef) -> RawResult<OpObject> {
        // SAFETY: the caller's contract.
        guard("open", || unsafe { (self.open)(host) })
    }
}

/// Registers ops of this crate, for its plugin and for programs that link it in.
///
/// A program that links the crate must name it (`use my_ops as _;`), or the linker drops the
/// registrations.
#[macro_export]
macro_rules! register_ops {
    ($($op:ty),+ $(,)?) => {
        $($crate::inventory::submit! { $crate::export::Registration::of::<$op>() })+
    };
}

/// Makes the crate a plugin with the ops that the named crates, or this one, register.
///
/// Stands in a crate of its own of type `cdylib`: two exported roots in one program do not link.
#[macro_export]
macro_rules! export_plugin {
    ($($ops:ident),* $(,)?) => {
        $(use $ops as _;)*

        #[doc(hidden)]
        #[allow(unsafe_code, reason = "exports the symbol that a host looks for")]
        // SAFETY: the name is the one agreed with the host, which checks the layout behind it.
        #[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
        pub static QHX_PLUGIN_ROOT: $crate::abi::LibHeader =
            $crate::export::header();
    };
}

/// The root of this plugin or program, over all registered ops.
pub fn module() -> OpModuleRef {
    MODULE
}

const MODULE: OpModuleRef = {
    const STATIC: &WithMetadata<OpModule> =
        &WithMetadata::new(OpModule { describe, open: open_by_name });
    OpModuleRef(STATIC.static_as_prefix())
};

extern "C" fn root() -> RootModuleResult {
    __call_root_module_loader(module)
}

/// The header that [`crate::export_plugin!`] exports.
pub const fn header() -> LibHeader {
    // SAFETY: `root` returns an `OpModuleRef`, the type whose layout is recorded.
    unsafe { LibHeader::from_constructor::<OpModuleRef>(root, CheckTypeLayout::Yes) }
}

/// Descriptions of all registered ops, sorted by name.
pub fn descriptions() -> Vec<OpDescription> {
    let mut all: Vec<_> =
        inventory::iter::<Registration>.into_iter().map(|r| (r.describe)()).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

extern "C" fn describe() -> RString {
    let text = catch(|| serde_json::to_string(&descriptions()).unwrap_or_default());
    text.unwrap_or_default().into()
}

unsafe extern "C" fn open_by_name(name: RStr<'_>, host: HostRef) -> RawResult<OpObject> {
    guard("open", || {
        let registration = inventory::iter::<Registration>
            .into_iter()
            .find(|r| (r.describe)().name == name.as_str())
            .ok_or_else(|| {
                Error::new(ErrorCode::UNSUPPORTED, format!("this plugin has no op {name:?}"))
            })?;
        // SAFETY: the host vouches for `host`.
        unsafe { (registration.open)(host) }
    })
}

struct Instance<O> {
    op: O,
    host: Host,
    poisoned: bool,
}

unsafe fn open<O: Op>(host: HostRef) -> Result<OpObject> {
    // SAFETY: the caller vouches for `host`.
    let mut host = unsafe { Host::new(host, O::describe()) }?;
    let op = O::open(&mut host)?;
    let instance = Box::new(Instance { op, host, poisoned: false });
    Ok(OpObject { data: Box::into_raw(instance).cast(), vtable: Table::<O>::REF })
}

struct Table<O>(std::marker::PhantomData<O>);

impl<O: Op> Table<O> {
    const STATIC: &'static WithMetadata<OpVTable> = &WithMetadata::new(OpVTable {
        close: close::<O>,
        info: info::<O>,
        position: position::<O>,
        place: place::<O>,
        call: call::<O>,
    });
    const REF: OpVTableRef = OpVTableRef(Self::STATIC.static_as_prefix());
}

/// The part of an op that generates; an error where it does not.
fn generator<O: Op>(op: &mut O) -> Result<&mut dyn Generator> {
    op.generator().ok_or_else(|| Error::unsupported("generation"))
}

/// The part of an op that embeds; an error where it does not.
fn encoder<O: Op>(op: &mut O) -> Result<&mut dyn Encoder> {
    op.encoder().ok_or_else(|| Error::unsupported("embedding"))
}

/// Runs a call of the op.
fn answer<O: Op>(Instance { op, host, .. }: &mut Instance<O>, call: Call<'_>) -> Result<RawReply> {
    let done = |()| RawReply::default();
    let json = |text: RString| RawReply { bytes: text.into_bytes(), ..RawReply::default() };
    let view = match call {
        Call::Prefill(segments) => generator(op)?.prefill(host, segments)?,
        Call::Decode(token) => generator(op)?.decode(host, token)?,
        Call::RowLogits(row) => generator(op)?.row_logits(host, row)?,
        Call::Draft(token) => generator(op)?.draft(host, token)?,
        Call::Embed(segments) => encoder(op)?.embed(host, segments)?,
        Call::EmbedMany(texts) => encoder(op)?.embed_many(host, texts)?,
        Call::EmbedTokens(segments) => encoder(op)?.embed_tokens(host, segments)?,
        Call::Speak(segments) => {
            let part = op.synthesizer().ok_or_else(|| Error::unsupported("speaking"))?;
            part.speak(host, segments)?
        }
        // An op without a state has nothing to forget.
        Call::Reset => {
            op.generator().map_or(Ok(()), |part| part.reset(host))?;
            return op.recognizer().map_or(Ok(()), |part| part.reset(host)).map(done);
        }
        Call::Truncate(position) => return generator(op)?.truncate(host, position).map(done),
        Call::Snapshot => {
            let SnapshotId(number) = generator(op)?.snapshot(host)?;
            return Ok(RawReply { number, ..RawReply::default() });
        }
        Call::Restore(snapshot) => return generator(op)?.restore(host, snapshot).map(done),
        Call::DropSnapshot(snapshot) => {
            return generator(op).map(|part| part.drop_snapshot(host, snapshot)).map(done);
        }
        Call::Verify(tokens) => return generator(op)?.verify(host, tokens).map(done),
        Call::Accept(count) => return generator(op)?.accept(host, count).map(done),
        Call::Drafting(on) => return generator(op)?.drafting(host, on).map(done),
        Call::ExportState => {
            let bytes = generator(op)?.export_state(host)?.into();
            return Ok(RawReply { bytes, ..RawReply::default() });
        }
        Call::ImportState { position, state } => {
            return generator(op)?.import_state(host, position, state).map(done);
        }
        Call::Note => return to_json(&generator(op)?.note()).map(json),
        Call::Answer(segments) => {
            let recognizer = op.recognizer().ok_or_else(|| Error::unsupported("answering"))?;
            return to_json(&recognizer.answer(host, segments)?).map(json);
        }
    };
    Ok(RawReply { view: raw_view(host, view)?, ..RawReply::default() })
}

unsafe extern "C" fn call<O: Op>(data: *mut c_void, raw: RawCall<'_>) -> RawResult<RawReply> {
    let name = raw.name.as_str();
    let segments: Vec<_> = raw.segments.iter().map(Segment::from).collect();
    let texts: Vec<_> = raw.texts.iter().map(|text| text.as_slice()).collect();
    let body = |instance: &mut Instance<O>| match raw.lifted(&segments, &texts) {
        Some(call) => answer(instance, call),
        None => Err(Error::unsupported(&format!("the call {name:?}"))),
    };
    // SAFETY: as the host promises for every call.
    unsafe { with::<O, _>(data, name, body) }
}

unsafe extern "C" fn position<O: Op>(data: *mut c_void) -> u64 {
    let body = |i: &mut Instance<O>| Ok(i.op.generator().map_or(0, |part| part.position()) as u64);
    // SAFETY: as the host promises for every call.
    unsafe { with::<O, _>(data, "position", body) }.unwrap_or(0)
}

unsafe extern "C" fn place<O: Op>(
    data: *mut c_void,
    segment: RawSegment<'_>,
) -> RawResult<RString> {
    let segment = Segment::from(&segment);
    let body = |i: &mut Instance<O>| match i.op.generator() {
        Some(part) if takes(i.host.op(), &segment) != Some(false) => {
            to_json(&part.place(&segment)?)
        }
        _ => Err(not_taken(i.host.op(), &segment)),
    };
    // SAFETY: as the host promises for every call.
    unsafe { with::<O, _>(data, "place", body) }
}

/// Runs `body`; a panic becomes an error that names the call.
fn guard<T: StableAbi>(call: &str, body: impl FnOnce() -> Result<T>) -> RawResult<T> {
    match catch(body) {
        Ok(Ok(value)) => RResult::ROk(value),
        Ok(Err(error)) => RResult::RErr(RawError::from(error)),
        Err(message) => {
            let text = format!("the host-op panicked in {call}: {message}");
            RResult::RErr(RawError::from(Error::new(ErrorCode::PANIC, text)))
        }
    }
}

/// Runs `body` on the instance. After a panic the op's state is unknown, so it refuses to go on.
unsafe fn with<O: Op, T: StableAbi>(
    data: *mut c_void,
    call: &str,
    body: impl FnOnce(&mut Instance<O>) -> Result<T>,
) -> RawResult<T> {
    // SAFETY: `data` was made by `open::<O>`, whose vtable is the only way here; the host makes
    // one call at a time.
    let instance = unsafe { &mut *data.cast::<Instance<O>>() };
    if instance.poisoned {
        let error = Error::new(ErrorCode::PANIC, "the host-op panicked before; open it again");
        return RResult::RErr(error.into());
    }
    let result = guard(call, || body(instance));
    if let RResult::RErr(error) = &result
        && error.code == ErrorCode::PANIC.0
    {
        instance.poisoned = true;
    }
    result
}

unsafe extern "C" fn close<O: Op>(data: *mut c_void) {
    // SAFETY: made by `Box::into_raw` in `open::<O>`; the host closes once.
    let instance = unsafe { Box::from_raw(data.cast::<Instance<O>>()) };
    let _ = catch(|| drop(instance));
}

unsafe extern "C" fn info<O: Op>(data: *mut c_void) -> RString {
    // SAFETY: as the host promises for every call.
    let text = unsafe {
        with::<O, RString>(data, "info", |i| {
            let mut info = i.op.info();
            if info.verification == Verification::default() {
                info.verification = Verification::refused("the host-op declares no steps that do");
            }
            Ok(serde_json::to_string(&info).unwrap_or_default().into())
        })
    };
    text.unwrap_or_default()
}

fn to_json(value: &impl serde::Serialize) -> Result<RString> {
    let text = serde_json::to_string(value);
    text.map(RString::from).map_err(|e| Error::new(ErrorCode::INTERNAL, e.to_string()))
}

fn raw_view(host: &Host, view: View) -> Result<RawView> {
    Ok(RawView {
        buffer: host.raw_id(view.buffer),
        dtype: raw_dtype(view.dtype)?,
        offset: view.offset as u64,
        len: view.len as u64,
    })
}

#[cfg(test)]
mod tests {
    use crate::abi::ROOT_MODULE_LOADER_NAME;

    #[test]
    fn the_exported_symbol_is_the_one_that_hosts_look_for() {
        assert_eq!(ROOT_MODULE_LOADER_NAME, "_1as_0lib_1header_0root_bmodule_bloader");
    }
}
