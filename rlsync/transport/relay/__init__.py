"""Weights on their way to other machines: a learner's sender, a mailbox, and one agent for each node.

The learner puts one flat image of a version into a store that all nodes can read, and posts a message about
it to the mailbox. Agents ask the mailbox, pull the image, check it, and publish it on their node's board
under the same stamp. This room decides; it neither sends nor waits. Whoever runs it brings messages and the
time, so that the same code runs on a real cluster and in a simulated network.
"""
