//! Writes down what is said in audio files: `transcribe BUNDLE FILE…`.

fn main() -> qhx::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut transcriber = qhx::Bundle::open(arguments.next().unwrap_or_default())?.transcriber()?;
    for file in arguments {
        let transcript = transcriber.transcribe(&file)?;
        println!("{}", transcript.text);
        for chunk in &transcript.chunks {
            eprintln!("{file}: {:.1} s to {:.1} s: {}", chunk.start, chunk.end, chunk.text);
        }
    }
    Ok(())
}
