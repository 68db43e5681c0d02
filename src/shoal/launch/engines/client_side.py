"""The other end of `client.py`: what a client of somebody's cluster does with the words of its supervisor."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from shoal.comm.channel import Channel
from shoal.comm.words import understood
from shoal.errors import CommError, LaunchError
from shoal.launch.engines.client_words import TO_CLIENT, ClientDismissed, ClientFailed
from shoal.spec.told import Told

_LOOK_EVERY_S = 0.2


class ServingClient(ABC):
    """One run's hold on a cluster, for as long as its supervisor wants it, or its agents live."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_dismissed = False

    @property
    @abstractmethod
    def has_agents(self) -> bool:
        """Whether any of those that it started still runs."""

    @abstractmethod
    def take(self, word: Told) -> None:
        """Do what is asked. LaunchError, in a sentence, where that cannot be."""

    @abstractmethod
    def look(self) -> None:
        """Say which agents have ended."""

    @abstractmethod
    def give_back(self) -> None:
        """End all agents that are left, and hold nothing any more."""

    def serve(self) -> None:
        """Do what the supervisor asks for, until it dismisses this client; or is gone, and all agents, too."""
        try:
            while not self.is_dismissed:
                self.take_all(_LOOK_EVERY_S)
                self.look()
        except CommError:  # The supervisor is gone. Another may have taken over its agents, who end by themselves.
            while self.has_agents:
                time.sleep(_LOOK_EVERY_S)
                self.look()
        self.give_back()

    def take_all(self, wait_s: float) -> None:
        """Take what the supervisor has said; wait so long where there is nothing yet."""
        while (message := self._channel.receive(wait_s)) is not None:
            wait_s = 0.0
            word = understood(message, TO_CLIENT)
            if isinstance(word, ClientDismissed):
                self.is_dismissed = True
                continue
            try:
                self.take(word)
            except LaunchError as error:
                self.say(ClientFailed(text=str(error)))

    def say(self, word: Told) -> None:
        """Tell the supervisor something, if it is there."""
        try:
            self._channel.send(word.as_message())
        except CommError:
            pass  # It will be noticed where it is heard.
