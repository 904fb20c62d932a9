//! Memory of opening a bundle whose table is 1 GB: files are mapped, not read.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use qhx_benches::memory::peak_and_anonymous;
use qhx_benches::null::linked;
use qhx_benches::shapes::{Decoder, EMBED, QWEN35_08B, open_qwen35};
use qhx_core::op::Segment;
use qhx_ops_qwen35 as _;

/// 0.8B shapes with a vocabulary whose table is 2^30 bytes.
const SHAPES: Decoder = Decoder { vocab: 524_288, ..QWEN35_08B };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let bytes = SHAPES.embed_bytes();
    let mut file = File::create(folder.path().join(EMBED))?;
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    for _ in 0..bytes / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    drop((file, block));

    let mb = |bytes: u64| bytes as f64 / 1e6;
    let plugins = linked()?;
    let (before, _) = peak_and_anonymous();
    let start = Instant::now();
    let mut op = open_qwen35(folder.path(), &plugins, SHAPES)?;
    let opened = start.elapsed();
    let (peak, anonymous) = peak_and_anonymous();
    println!("bundle with a mapped table of {:.0} MB", mb(bytes as u64));
    println!("opened in {:.2} ms", opened.as_secs_f64() * 1e3);
    println!(
        "peak RSS before {:.1} MB, after opening {:.1} MB (of it not from files: {:.1} MB)",
        mb(before),
        mb(peak),
        mb(anonymous)
    );
    op.prefill(&[Segment::Tokens(&(0..500).map(|i| i * 1000).collect::<Vec<_>>())])?;
    let (peak, anonymous) = peak_and_anonymous();
    println!(
        "after 500 tokens from all over the table: {:.1} MB (not from files: {:.1} MB)",
        mb(peak),
        mb(anonymous)
    );
    println!("peak RSS over the mapped size: {:.3}", peak as f64 / bytes as f64);
    Ok(())
}
