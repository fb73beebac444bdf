//! Collects events, joining neighbours of one kind.

use super::Event;

/// The events of one push, and the number of calls begun so far.
#[derive(Debug, Default)]
pub(super) struct Sink {
    events: Vec<Event>,
    calls: usize,
}

impl Sink {
    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    pub(super) fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(Event::Content(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.events.push(Event::Content(text.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.events.push(Event::Reasoning(text.to_owned())),
        }
    }

    /// Begins the next call.
    pub(super) fn start(&mut self, name: String) {
        self.events.push(Event::ToolCallStart {
            index: self.calls,
            name,
        });
        self.calls += 1;
    }

    /// More of the arguments of the call begun last.
    pub(super) fn arguments(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(Event::ToolCallArguments { delta, .. }) => delta.push_str(text),
            _ if text.is_empty() => {}
            _ => self.events.push(Event::ToolCallArguments {
                index: self.calls - 1,
                delta: text.to_owned(),
            }),
        }
    }

    /// Ends the call begun last.
    pub(super) fn end(&mut self, valid: bool) {
        self.events.push(Event::ToolCallEnd {
            index: self.calls - 1,
            valid,
        });
    }
}
