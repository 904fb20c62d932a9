//! Cost of the C ABI: the same answers by the Rust engine and by `qhx_generate_ex`, in turns, in one run.
//!
//! `c_abi BUNDLE [TOKENS [TURNS]]`. Both run on the CPU backend with the host-ops linked in; the callback of the C ABI
//! takes every piece of the text, and `should_cancel` is asked between tokens, as an app's binding does.

#![expect(clippy::print_stdout, reason = "the report is the result")]
#![expect(
    unsafe_code,
    reason = "is called as C calls: with a pointer to what the callback writes to"
)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use qhexrt::abi::{self, GenCfg, GenerateOptions, Inputs, Output, RuntimeOptions, SessionHandle};
use qhexrt::exports::{
    qhx_generate_ex, qhx_model_load, qhx_runtime_create_ex, qhx_session_create, qhx_session_reset,
};
use qhx::{BackendChoice, Bundle, Event, Model, Request, Runtime};

type AnyError = Box<dyn std::error::Error>;

const PROMPT: &str = "The capital of France is";

/// Bytes of the text that came.
#[derive(Default)]
struct Bytes(usize);

unsafe extern "C-unwind" fn take(
    user: *mut c_void,
    _text: *const c_char,
    len: c_int,
    _token: c_int,
    _is_final: c_int,
) -> c_int {
    // SAFETY: `user` is the `Bytes` of the call below, which nothing else uses meanwhile.
    unsafe { (*user.cast::<Bytes>()).0 += usize::try_from(len).unwrap_or(0) };
    1
}

unsafe extern "C-unwind" fn goes_on(_user: *mut c_void) -> c_int {
    0
}

/// Time of a token without the prompt's graphs.
fn by_rust(model: &mut Model, tokens: usize) -> Result<(Duration, String), AnyError> {
    model.reset()?;
    let request = Request::completion(PROMPT).max_new(tokens);
    let start = Instant::now();
    let mut run = model.start(&request)?;
    let mut bytes = Bytes::default();
    while let Some(event) = run.next_event()? {
        if let Event::Token { text, .. } | Event::Rest { text } = event {
            bytes.0 += text.len();
        }
    }
    std::hint::black_box(bytes.0);
    let generation = run.finish()?;
    let time = start.elapsed().saturating_sub(generation.timings.prefill);
    let count = u32::try_from(generation.tokens.len())?.max(1);
    Ok((time / count, generation.text))
}

fn by_c(
    session: *mut SessionHandle,
    text: &CString,
    tokens: usize,
) -> Result<(Duration, String), AnyError> {
    qhx_session_reset(session);
    let inputs = Inputs { text: text.as_ptr(), no_template: 1, ..Inputs::default() };
    let cfg = GenCfg { max_new_tokens: c_int::try_from(tokens)?, ..GenCfg::default() };
    let options = GenerateOptions { should_cancel: Some(goes_on), ..GenerateOptions::default() };
    let (mut bytes, mut output) = (Bytes::default(), Output::empty(0));
    let start = Instant::now();
    let user = ptr::from_mut(&mut bytes).cast();
    let status = qhx_generate_ex(session, &inputs, &cfg, &options, Some(take), user, &mut output);
    let time = start.elapsed();
    if status != abi::OK {
        return Err(format!("status {status}").into());
    }
    let decoded = time.saturating_sub(Duration::from_secs_f64(output.prefill_ms / 1e3));
    // SAFETY: the session's text, which has this number of bytes until the next call.
    let text = unsafe { std::slice::from_raw_parts(output.text.cast::<u8>(), output.n_text) };
    let count = u32::try_from(output.n_generated)?.max(1);
    Ok((decoded / count, String::from_utf8(text.to_vec())?))
}

fn main() -> Result<(), AnyError> {
    let mut arguments = std::env::args().skip(1);
    let bundle = arguments.next().ok_or("expected a bundle")?;
    let tokens = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let turns = arguments.next().map_or(Ok(40), |text| text.parse())?.max(1);
    let runtime = Runtime::builder().backend(BackendChoice::Cpu).threads(1).build();
    let mut model = runtime.load(&Bundle::open(&bundle)?)?;
    let options =
        RuntimeOptions { backend: c"cpu".as_ptr(), threads: 1, ..RuntimeOptions::default() };
    let path = CString::new(bundle)?;
    let loaded = qhx_model_load(qhx_runtime_create_ex(&options), path.as_ptr(), ptr::null());
    let session = qhx_session_create(loaded);
    let text = CString::new(PROMPT)?;
    let (mut rust, mut c) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        // By turns who is first: the other one finds its memory in the caches, or not.
        let early = (turn % 2 == 1).then(|| by_c(session, &text, tokens)).transpose()?;
        let (time, answer) = by_rust(&mut model, tokens)?;
        rust.push(time);
        let (time, same) = early.map_or_else(|| by_c(session, &text, tokens), Ok)?;
        c.push(time);
        if turn == 0 && answer != same {
            return Err(format!("two answers: {answer:?} and {same:?}").into());
        }
    }
    let mut ratios: Vec<_> =
        rust.iter().zip(&c).map(|(rust, c)| c.as_secs_f64() / rust.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    rust.sort();
    c.sort();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    println!("time of a token in us, {turns} turns of {tokens} tokens: best, median");
    println!("  Rust engine {:8.1} {:8.1}", us(rust[0]), us(rust[turns / 2]));
    println!("  C ABI       {:8.1} {:8.1}", us(c[0]), us(c[turns / 2]));
    println!("  ratio       {:8.4} {:8.4}", us(c[0]) / us(rust[0]), ratios[turns / 2]);
    Ok(())
}
