//! One model, one worker thread, requests from anywhere: `worker BUNDLE PROMPT…`. While a generation runs, other
//! threads count tokens; the last prompt is cancelled after three tokens, and the others are not.

use std::sync::mpsc;
use std::thread;

use qhx::{Bundle, Event, Request};

fn main() -> qhx::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut model = Bundle::open(arguments.next().unwrap_or_default())?.model()?;
    let texts = model.texts();
    let prompts: Vec<String> = arguments.collect();
    let (sender, requests) = mpsc::channel::<(usize, Request)>();
    let (results, answers) = mpsc::channel();
    let worker = thread::spawn(move || -> qhx::Result<()> {
        for (index, request) in requests {
            let mut run = model.start(&request)?;
            let mut tokens = 0;
            while let Some(event) = run.next_event()? {
                tokens += usize::from(matches!(event, Event::Token { .. }));
                if tokens == 3 {
                    // Somebody else's ticket stops nothing here.
                    let _ = results.send((index, None));
                }
            }
            let _ = results.send((index, Some(run.finish()?)));
        }
        Ok(())
    });
    let mut tickets = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        eprintln!("{} tokens: {prompt}", texts.encode(prompt)?.len());
        let request = Request::completion(prompt).max_new(12);
        tickets.push(request.cancel.clone());
        let _ = sender.send((index, request));
    }
    drop(sender);
    for (index, answer) in answers {
        match answer {
            None if index + 1 == prompts.len() => tickets[index].cancel(),
            None => {}
            Some(answer) => println!("{} {}", answer.finish_reason.name(), answer.text.trim()),
        }
    }
    worker.join().unwrap_or(Ok(()))
}
