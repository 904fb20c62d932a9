//! An open op of a plugin as the engine's [`HostOp`].

#![expect(unsafe_code, reason = "calls a plugin's vtable")]

use std::time::Duration;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::op::{
    Call, HostOp, Logits, OpEntry, OpServices, OpSource, OpenInfo, Packing, Placement, Reply,
    Segment, SpanStats, Task, Unsupported,
};
use qhx_exec::BufferId;
use qhx_exec::workspace::GraphStats;
use qhx_op::abi::{OpModuleRef, OpObject, RResult, RawError, RawView, VIEW_F16, VIEW_F32};
use qhx_op::calls::CallError;

use crate::names;
use crate::services::{Session, kind};
use crate::views::{self, Kind};

/// An op behind the plugin interface.
pub(crate) struct PluginOp {
    name: String,
    source: OpSource,
    object: OpObject,
    /// Outlives `object`: `Drop` closes the op first.
    session: Box<Session>,
    info: OpenInfo,
    logits: Option<RawView>,
    /// Vectors or samples of the last call, which were found to lie in their buffer.
    values: Option<RawView>,
    /// The last logits that were found to be what their graph writes.
    agreed: Option<RawView>,
}

// SAFETY: the interface lets an op's calls come from different threads, one at a time, and every
// call here takes `&mut self`.
unsafe impl Send for PluginOp {}

impl PluginOp {
    /// Opens an op of `module` over a bundle.
    pub(crate) fn open(entry: &OpEntry, module: OpModuleRef, services: OpServices) -> Result<Self> {
        let OpEntry { description, source } = entry;
        let name = description.name.as_str();
        names::check(name, &services.manifest, &services.workspace)?;
        let session = Session::new(name, services);
        // SAFETY: the session outlives the op, and its `data` fits its vtable.
        let opened = unsafe { module.open()(name.into(), session.host()) };
        let object = match opened {
            RResult::ROk(object) => object,
            RResult::RErr(raw) => return Err(error(&session, name, source, raw)),
        };
        let mut op = Self {
            name: name.to_owned(),
            source: source.clone(),
            object,
            session,
            info: OpenInfo::default(),
            logits: None,
            values: None,
            agreed: None,
        };
        // SAFETY: an open op.
        let info = unsafe { op.object.vtable.info()(op.object.data) };
        op.info = serde_json::from_str(&info).map_err(|e| {
            Error::caused(
                ErrorKind::Plugin,
                format_args!("host-op {name:?}: its description of the open model is not valid"),
                e,
            )
        })?;
        op.check_packing();
        op.info.softcap = op.info.softcap.filter(|cap| cap.is_finite() && *cap > 0.0);
        if op.info.vocab == 0 && description.tasks == [Task::Generate] {
            return Err(Error::new(
                ErrorKind::Plugin,
                format!(
                    "host-op {name:?}: OpenInfo.vocab is 0, expected the number of logits of an op that \
                     generates"
                ),
            ));
        }
        Ok(op)
    }

    /// Keeps of the op's packing what the engine can rely on: lengths in order, and costs that can be compared.
    fn check_packing(&mut self) {
        let none = self.info.values() == 0;
        let Packing { buckets } = &mut self.info.packing;
        if none {
            buckets.clear();
        }
        buckets.retain(|bucket| bucket.rows > 0 && bucket.cost.is_finite() && bucket.cost > 0.0);
        buckets.sort_by_key(|bucket| bucket.rows);
    }

    /// Result of the op's `call`, with its error made a host error.
    fn returned<T>(&self, call: &str, result: std::result::Result<T, CallError>) -> Result<T> {
        result.map_err(|e| match e {
            CallError::Failed(raw) => error(&self.session, &self.name, &self.source, raw),
            CallError::Invalid(e) => {
                let what = format_args!("host-op {:?}: what {call} returned", self.name);
                Error::caused(ErrorKind::Plugin, what, e)
            }
        })
    }

    /// Checks the logits that the op returned, and what it declares about their number.
    fn check_logits(&mut self, view: RawView) -> Result<RawView> {
        let view = self.check(view, "logits")?;
        let same = |a: &RawView| {
            (a.buffer, a.dtype, a.offset, a.len) == (view.buffer, view.dtype, view.offset, view.len)
        };
        if self.agreed.as_ref().is_some_and(same) {
            return Ok(view);
        }
        // SAFETY: no call of the op is under way.
        let workspace = &unsafe { self.session.shared() }.workspace;
        views::agree(&self.name, Kind::Logits, view, workspace)?;
        if view.len != self.info.vocab as u64 {
            let written = workspace.outputs_in(BufferId(view.buffer)).next();
            let place = written.map_or(String::new(), |(graph, tensor, _)| {
                format!(", which graph {:?} writes as tensor {tensor}", graph.name)
            });
            return Err(Error::new(
                ErrorKind::Plugin,
                format!(
                    "host-op {:?}: OpenInfo.vocab is {}, but its logits have {} values{place}",
                    self.name, self.info.vocab, view.len
                ),
            )
            .hint("the two must be one number; this is a fault of the op, tell its author"));
        }
        self.agreed = Some(view);
        Ok(view)
    }

    /// Checks a view that the op returned against the buffer it names.
    fn check(&self, view: RawView, what: &str) -> Result<RawView> {
        let misbehaved = |why: String| {
            Error::new(ErrorKind::Plugin, format!("host-op {:?}: {what} {why}", self.name))
        };
        let size = match view.dtype {
            VIEW_F16 => 2,
            VIEW_F32 => 4,
            other => return Err(misbehaved(format!("have the unknown dtype {other}"))),
        };
        // SAFETY: no call of the op is under way.
        let bytes = unsafe { self.session.shared() }.workspace.bytes(BufferId(view.buffer))?.len();
        let end = view.len.checked_mul(size).and_then(|n| n.checked_add(view.offset));
        if end.is_none_or(|end| end > bytes as u64) || !view.offset.is_multiple_of(size) {
            return Err(misbehaved(format!(
                "lie at byte {} of a buffer of {bytes} bytes, which they do not fit",
                view.offset
            )));
        }
        Ok(view)
    }

    /// Checks the vectors of texts that the op returned.
    fn check_vectors(&self, view: RawView, texts: usize) -> Result<()> {
        let view = self.check(view, "values of the embedding")?;
        let declared = self.info.values() as u64;
        if declared != 0 && Some(view.len) != declared.checked_mul(texts as u64) {
            let of = if texts == 1 { String::new() } else { format!(" of {texts} texts") };
            return Err(Error::new(
                ErrorKind::Plugin,
                format!(
                    "host-op {:?}: OpenInfo declares {declared} values, but its embedding{of} has {} values",
                    self.name, view.len
                ),
            ));
        }
        // SAFETY: no call of the op is under way.
        let workspace = &unsafe { self.session.shared() }.workspace;
        views::agree(&self.name, Kind::Embedding, view, workspace)?;
        self.singles(view, "embedding").map(drop)
    }

    /// The values of a view that has to be f32.
    fn singles(&self, view: RawView, what: &str) -> Result<&[f32]> {
        match self.view(view)? {
            Logits::F32(values) => Ok(values),
            Logits::F16(_) => Err(Error::new(
                ErrorKind::Plugin,
                format!("host-op {:?}: its {what} is f16, expected f32", self.name),
            )),
        }
    }

    fn view(&self, view: RawView) -> Result<Logits<'_>> {
        // SAFETY: no call of the op is under way: calls take `&mut self`.
        let bytes = unsafe { self.session.shared() }.workspace.bytes(BufferId(view.buffer))?;
        let start = view.offset as usize;
        let size = if view.dtype == VIEW_F16 { 2 } else { 4 };
        let bytes = bytes.get(start..start + view.len as usize * size).unwrap_or(&[]);
        // SAFETY: every bit pattern is a valid f16 or f32; `align_to` checks alignment.
        let (f16s, f32s) = unsafe { (bytes.align_to::<f16>(), bytes.align_to::<f32>()) };
        let aligned = if size == 2 { f16s.0.is_empty() } else { f32s.0.is_empty() };
        if !aligned {
            return Err(Error::new(
                ErrorKind::Plugin,
                format!("host-op {:?}: its values lie at an unaligned address", self.name),
            ));
        }
        Ok(if size == 2 { Logits::F16(f16s.1) } else { Logits::F32(f32s.1) })
    }
}

/// Turns an error of the op into one of the core. One of a service that passed through the op keeps
/// its kind, hint and code.
fn error(session: &Session, name: &str, source: &OpSource, raw: RawError) -> Error {
    // SAFETY: the call that failed has returned.
    if let Some(error) = unsafe { session.exclusive() }.errors.take(&raw) {
        return error;
    }
    if raw.code == qhx_op::ErrorCode::CANCELLED.0 {
        return Error::new(ErrorKind::Cancelled, "cancelled");
    }
    let message: String = raw.message.into();
    let error = Error::new(kind(raw.code), message);
    if raw.code == qhx_op::ErrorCode::UNSUPPORTED.0 {
        return error.with_source(Unsupported);
    }
    if raw.code != qhx_op::ErrorCode::PANIC.0 {
        return error;
    }
    match source {
        OpSource::Builtin => error.context(format_args!("host-op {name:?}")),
        OpSource::Plugin(path) => error
            .context(format_args!("host-op {name:?} of {}", path.display()))
            .hint("this is a fault of the plugin; report it to its author"),
    }
}

impl HostOp for PluginOp {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn position(&self) -> usize {
        // SAFETY: an open op; no other call is under way, since those take `&mut self`.
        unsafe { self.object.vtable.position()(self.object.data) as usize }
    }

    fn place(&self, segment: Segment<'_>) -> Result<Placement> {
        // SAFETY: an open op; no other call is under way, since those take `&mut self`.
        self.returned("place", unsafe { self.object.place(segment) })
    }

    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        let (effect, name) = (call.effect(), call.name());
        self.logits = self.logits.filter(|_| !effect.ends_logits() && !call.gives_logits());
        // SAFETY: an open op; `&mut self` makes it the only call under way.
        let reply = self.returned(name, unsafe { self.object.call(call) })?;
        reply.try_map(|view| {
            match call {
                Call::Embed(_) | Call::EmbedMany(_) => self.check_vectors(view, effect.texts())?,
                Call::EmbedTokens(_) => {
                    self.check(view, "values of a text and its tokens")?;
                    self.singles(view, "embedding")?;
                }
                Call::Speak(_) => {
                    self.check(view, "samples of the audio")?;
                    self.singles(view, "audio")?;
                }
                _ => self.logits = Some(self.check_logits(view)?),
            }
            self.values = (!call.gives_logits()).then_some(view);
            Ok(())
        })
    }

    fn logits(&self) -> Result<Logits<'_>> {
        let view = self.logits.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "there are no logits: nothing was consumed yet")
        })?;
        self.view(view)
    }

    fn values(&self) -> Result<&[f32]> {
        let view = self.values.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "there are no vectors or samples: no call gave some")
        })?;
        self.singles(view, "output")
    }

    fn logits_origin(&self) -> Option<String> {
        // SAFETY: no call of the op is under way.
        let workspace = &unsafe { self.session.shared() }.workspace;
        views::origin(self.logits?, workspace)
    }

    fn graph_time(&self) -> Duration {
        // SAFETY: no call of the op is under way.
        unsafe { self.session.shared() }.workspace.graph_time()
    }

    fn graph_stats(&self) -> Vec<GraphStats> {
        // SAFETY: no call of the op is under way.
        unsafe { self.session.shared() }.workspace.stats()
    }

    fn span_stats(&self) -> Vec<SpanStats> {
        // SAFETY: no call of the op is under way.
        unsafe { self.session.shared() }.spans().to_vec()
    }
}

impl Drop for PluginOp {
    fn drop(&mut self) {
        // SAFETY: opened once in `open`, closed only here, before the session is freed.
        unsafe { self.object.vtable.close()(self.object.data) }
    }
}
