//! Talks with a model: `chat BUNDLE < MESSAGES`, one message a line.

use std::io::{BufRead as _, Write as _};

use qhx::{Bundle, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bundle = std::env::args().nth(1).unwrap_or_default();
    let request = Request::chat([]).max_new(64);
    let mut chat = Bundle::open(bundle)?.chat()?.with_request(request);
    for line in std::io::stdin().lock().lines() {
        let mut answer = chat.send(line?)?;
        for piece in &mut answer {
            print!("{}", piece?);
            std::io::stdout().flush()?;
        }
        println!();
        let generation = answer.finish()?;
        eprintln!("{} positions were there already", generation.reused_tokens);
    }
    Ok(())
}
