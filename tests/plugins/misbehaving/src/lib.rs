//! Host-ops that misbehave on purpose, each in one way, over the graph `step` with the output
//! `logits`. They show that a host survives them and says what happened.

#![expect(clippy::panic, reason = "panicking is what some of these ops are for")]

use std::panic::panic_any;
use std::time::Duration;

use qhx_op::{
    DType, Error, Generator, GraphId, Host, LogLevel, Modality, Op, OpDescription, OpenInfo, Port,
    Result, Segment, Task, View,
};

/// In which way an op misbehaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    PanicInOpen,
    PanicInPrefill,
    PanicInDecode,
    NanLogits,
    WrongLength,
    WrongDtype,
    WrongVocab,
    ForgetsToBind,
    BeyondBuffer,
    EndlessLoop,
    NeverReturns,
    WritePastEnd,
    /// Throws a [`Bomb`] in `decode`, on the host's threads in the second `prefill`, and when it is
    /// closed.
    ThrowBombs,
}

/// Panics when it is dropped, a few times over: each throws the next.
struct Bomb(u32);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 && !std::thread::panicking() {
            panic_any(Bomb(self.0 - 1));
        }
    }
}

struct Faulty<const FAULT: usize> {
    graph: GraphId,
    logits: View,
    position: usize,
}

const FAULTS: [(Fault, &str); 13] = [
    (Fault::PanicInOpen, "test_panic_in_open"),
    (Fault::PanicInPrefill, "test_panic_in_prefill"),
    (Fault::PanicInDecode, "test_panic_in_decode"),
    (Fault::NanLogits, "test_nan_logits"),
    (Fault::WrongLength, "test_wrong_length"),
    (Fault::BeyondBuffer, "test_beyond_buffer"),
    (Fault::EndlessLoop, "test_endless_loop"),
    (Fault::WritePastEnd, "test_write_past_end"),
    (Fault::NeverReturns, "test_never_returns"),
    (Fault::ThrowBombs, "test_throw_bombs"),
    (Fault::WrongDtype, "test_wrong_dtype"),
    (Fault::WrongVocab, "test_wrong_vocab"),
    (Fault::ForgetsToBind, "test_forgets_to_bind"),
];

impl<const FAULT: usize> Faulty<FAULT> {
    const KIND: Fault = FAULTS[FAULT].0;

    fn view(&mut self, host: &mut Host) -> View {
        match Self::KIND {
            Fault::NanLogits => host.f32s_mut(self.logits.buffer).fill(f32::NAN),
            Fault::WritePastEnd => {
                let past = self.logits.len;
                host.f32s_mut(self.logits.buffer)[..=past].fill(1.0);
            }
            Fault::WrongDtype => return View { dtype: DType::F16, ..self.logits },
            Fault::WrongLength => return View { len: self.logits.len - 1, ..self.logits },
            Fault::BeyondBuffer => return View { offset: 1 << 40, ..self.logits },
            _ => {}
        }
        self.logits
    }
}

impl<const FAULT: usize> Drop for Faulty<FAULT> {
    fn drop(&mut self) {
        if Self::KIND == Fault::ThrowBombs {
            panic_any(Bomb(3));
        }
    }
}

impl<const FAULT: usize> Op for Faulty<FAULT> {
    fn describe() -> OpDescription {
        OpDescription {
            name: FAULTS[FAULT].1.to_owned(),
            summary: "misbehaves on purpose".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: serde_json::json!({}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        assert!(Self::KIND != Fault::PanicInOpen, "open goes wrong");
        let name: Option<String> = host.value("/plan/params/step")?;
        let name = name.as_deref().unwrap_or("step");
        let graph = host.require_graph("/plan/params/step", name)?;
        for index in 0..host.graph(graph).inputs.len() {
            host.allocate_for(graph, Port::Input(index))?;
        }
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let len = host.tensor(graph, port).elements();
        let logits = host.allocate_view(DType::F32, len)?;
        if Self::KIND != Fault::ForgetsToBind {
            for index in 0..host.graph(graph).outputs.len() {
                host.allocate_for(graph, Port::Output(index))?;
            }
            host.bind(graph, port, logits.buffer, 0)?;
        }
        Ok(Self { graph, logits, position: 0 })
    }

    fn info(&self) -> OpenInfo {
        let vocab = self.logits.len + usize::from(Self::KIND == Fault::WrongVocab);
        OpenInfo { vocab, max_ctx: 64, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl<const FAULT: usize> Generator for Faulty<FAULT> {
    fn reset(&mut self, _host: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        assert!(Self::KIND != Fault::PanicInPrefill, "prefill goes wrong");
        if Self::KIND == Fault::ThrowBombs {
            host.log(LogLevel::Info, "a line");
            host.progress(1, 2);
            if self.position > 0 {
                host.parallel_for(4, |_| panic_any(Bomb(3)))?;
            }
        }
        if Self::KIND == Fault::ForgetsToBind {
            host.execute(self.graph)?;
        }
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("text only"));
            };
            self.position += tokens.len();
        }
        Ok(self.view(host))
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        if Self::KIND == Fault::PanicInDecode {
            panic!("token {token} goes wrong");
        }
        if Self::KIND == Fault::ThrowBombs {
            panic_any(Bomb(3));
        }
        if Self::KIND == Fault::EndlessLoop {
            loop {
                host.execute(self.graph)?;
            }
        }
        if Self::KIND == Fault::NeverReturns {
            loop {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        self.position += 1;
        Ok(self.view(host))
    }
}

qhx_op::register_ops!(
    Faulty<0>,
    Faulty<1>,
    Faulty<2>,
    Faulty<3>,
    Faulty<4>,
    Faulty<5>,
    Faulty<6>,
    Faulty<7>,
    Faulty<8>,
    Faulty<9>,
    Faulty<10>,
    Faulty<11>,
    Faulty<12>,
);

// This crate registers and exports in one: nobody links it.
qhx_op::export_plugin!();
